"""Metrics of engine cores on other machines: the files in which processes keep their values, as they are, so that
/metrics merges those of all machines by the same rules, and keeps those of processes that are gone.

prometheus-client keeps one file per process and kind of metric. Its first four bytes say how much of it is in use.
"""

import contextlib
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

_NAME = re.compile(r"(counter|histogram|gauge_mostrecent)_(\d+)\.db")
_GAUGES = "gauge_"
_USED = struct.Struct("<i")
_COMPRESSION_LEVEL = 1
_MAX_FILE_BYTES = 64 * 1024 * 1024


class MetricFilesSource:
    """The files of this launcher's processes, and what the head knows of them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[str, bytes] = {}

    def changes(self) -> dict[str, bytes | None]:
        """What is new since the last call: contents, compressed, by file name; None for gauges that are gone.

        Counts stay true, whatever becomes of the files.
        """
        current = dict(self._contents())
        changed: dict[str, bytes | None] = {
            name: zlib.compress(content, _COMPRESSION_LEVEL)
            for name, content in current.items()
            if self._known.get(name) != content
        }
        changed |= {name: None for name in self._known.keys() - current.keys() if name.startswith(_GAUGES)}
        self._known = current
        return changed

    def _contents(self) -> Iterator[tuple[str, bytes]]:
        for path in self._directory.glob("*.db"):
            if _NAME.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):  # retired meanwhile
                    yield path.name, _content(path)


def _content(path: Path) -> bytes:
    """What is in use of the file: a small part, its space was taken in advance."""
    with path.open("rb") as stream:
        header = stream.read(_USED.size)
        used = _USED.unpack(header)[0] if len(header) == _USED.size else 0
        return header + stream.read(used - _USED.size) if used > _USED.size else b""


def keep(directory: Path, launcher: int, files: Mapping[str, bytes | None]) -> None:
    """Puts the files of launcher number `launcher` beside those of this machine, under names of their own.

    Raises:
        ValueError: what came is no metric file.
    """
    for name, content in files.items():
        path = directory / _name_here(name, launcher)
        if content is None:
            path.unlink(missing_ok=True)
            continue
        try:
            data = zlib.decompressobj().decompress(content, _MAX_FILE_BYTES)
        except zlib.error as error:
            raise ValueError(f"{name}: {error}") from None
        if len(data) < _USED.size:
            continue
        # Readers see the old file or the new one, and nothing whose name ends otherwise.
        unfinished = path.with_suffix(".new")
        unfinished.write_bytes(data)
        os.replace(unfinished, path)


def drop_gauges(directory: Path, launcher: int) -> None:
    """What the processes of a launcher counted stays true when they are gone; what they were just doing does not."""
    for path in directory.glob(f"gauge_mostrecent_{launcher}-*.db"):
        path.unlink(missing_ok=True)


def _name_here(name: str, launcher: int) -> str:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name[:100]!r} is no metric file")
    return f"{match[1]}_{launcher}-{match[2]}.db"
