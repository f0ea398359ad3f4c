"""Where a batch comes from and goes to: files, standard input and output, `file:` and `http(s):` addresses."""

import contextlib
import hashlib
import itertools
import os
import shutil
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO

from tokenmill_engine.config.cache_dir import cache_dir
from tokenmill_engine.errors import ConfigError, EngineError
from tokenmill_server.batch.journal import Journal, Output, Stream

_TIMEOUT_S = 300.0
_MAX_UPLOADS = 5
_BOM = b"\xef\xbb\xbf"


@contextlib.contextmanager
def open_input(place: str) -> Iterator[BinaryIO]:
    """The lines of the file, the address or (`-`) standard input, as a file of bytes.

    Raises:
        ConfigError: it cannot be read.
    """
    if place == "-":
        yield sys.stdin.buffer
        return
    try:
        file = _downloaded(place) if _is_http(place) else _path_of(place).open("rb")
    except OSError as error:
        raise ConfigError(f"cannot read {place}: {_reason(error)}") from None
    with file:
        if file.read(len(_BOM)) != _BOM:
            file.seek(0)
        yield file


def count_lines(file: BinaryIO) -> int | None:
    """Lines from here to the end that are not empty, or None if they can be read only once."""
    if not file.seekable():
        return None
    start = file.tell()
    count = sum(1 for line in file if line.strip())
    file.seek(start)
    return count


@contextlib.contextmanager
def open_output(
    place: str, folder: Path | None = None, *, overwrite: bool = False, retry_failed: bool = False
) -> Iterator[Output]:
    """What answers are written to. For an `http(s):` address they are kept in `folder` (by default in the cache
    directory), and sent with PUT when the block ends well.

    Raises:
        ConfigError: it cannot be written, or holds something else.
        EngineError: the address did not take it.
    """
    if place == "-":
        with contextlib.closing(Stream(sys.stdout.buffer)) as stream:
            yield stream
        return
    path = _kept_at(place, folder) if _is_http(place) else _path_of(place)
    with contextlib.closing(Journal(path, overwrite=overwrite, retry_failed=retry_failed)) as journal:
        yield journal
        if _is_http(place):
            _upload(path, place)
            path.unlink()


def _is_http(place: str) -> bool:
    return place.startswith(("http://", "https://"))


def _path_of(place: str) -> Path:
    if place.startswith("file://"):
        return Path(urllib.request.url2pathname(urllib.parse.urlsplit(place).path))
    return Path(place)


def _kept_at(address: str, folder: Path | None) -> Path:
    """A name that is the same in the next run, whose signature in the address may be another one."""
    folder = folder or cache_dir() / "batches"
    parts = urllib.parse.urlsplit(address)
    name = hashlib.sha256(f"{parts.netloc}{parts.path}".encode()).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror}; see --output-tmp-dir") from None
    return folder / f"{name}.jsonl"


def _downloaded(address: str) -> BinaryIO:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    try:
        with urllib.request.urlopen(address, timeout=_TIMEOUT_S) as response:
            shutil.copyfileobj(response, file)
    except (OSError, HTTPException, ValueError) as error:
        file.close()
        raise ConfigError(f"cannot read {_shown(address)}: {_reason(error)}") from None
    file.seek(0)
    return file


def _upload(path: Path, address: str) -> None:
    for attempt in itertools.count(1):
        try:
            with path.open("rb") as file:
                headers = {"Content-Length": str(os.fstat(file.fileno()).st_size), "Content-Type": "application/jsonl"}
                request = urllib.request.Request(address, data=file, headers=headers, method="PUT")
                urllib.request.urlopen(request, timeout=_TIMEOUT_S).close()
        except (OSError, HTTPException, ValueError) as error:
            if attempt == _MAX_UPLOADS:
                raise EngineError(
                    f"{_shown(address)} did not take the answers ({_reason(error)}), which are in {path}; the same "
                    "command sends them again"
                ) from None
        else:
            return


def _shown(address: str) -> str:
    """Without what may be a signature."""
    return address.partition("?")[0]


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        return f"HTTP {error.code}"
    return str(getattr(error, "strerror", None) or getattr(error, "reason", None) or error) or type(error).__name__
