"""The output file of a batch: appended to answer by answer, so that whatever kills the run, it goes on where it was.

A line is there once its newline is. What a dying process left without one is cut off, and its request sent again.
Only when everything is answered the lines are put into the order of the input, in a copy that takes the file's place.
"""

import errno
import fcntl
import logging
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from tokenmill_engine.errors import ConfigError, StartupError
from tokenmill_server.batch.lines import Answer, Key, key_of, read_written

logger = logging.getLogger(__name__)


class Journal:
    """One output file, locked while it is open. `answered` are the keys that it has an answer for."""

    def __init__(self, path: Path, *, overwrite: bool = False, retry_failed: bool = False) -> None:
        """`overwrite` begins anew, `retry_failed` forgets the failures.

        Raises:
            ConfigError: the file cannot be written, another run has it, or it holds something else.
        """
        self._path = path
        self._positions: dict[Key, tuple[int, int]] = {}
        """Where each answer is: offset, and bytes with the newline."""
        self._num_failed = 0
        self._fd = _open_locked(path)
        try:
            if overwrite:
                os.ftruncate(self._fd, 0)
            failed = self._read()
            if retry_failed and failed:
                self._forget(failed)
        except BaseException:
            self.close()
            raise

    @property
    def num_failed(self) -> int:
        """Answers that tell of a failure."""
        return self._num_failed

    def __contains__(self, key: Key) -> bool:
        return key in self._positions

    def __len__(self) -> int:
        return len(self._positions)

    def append(self, answer: Answer) -> None:
        """Raises StartupError if the disk is full; the file stays one that a next run can go on with."""
        line = msgspec.json.encode(answer) + b"\n"
        offset = os.fstat(self._fd).st_size
        try:
            _write_all(self._fd, line)
        except OSError as error:
            raise StartupError(f"cannot write {self._path}: {error.strerror}") from None
        self._positions[key_of(answer)] = (offset, len(line))
        self._num_failed += answer.error is not None

    def put_in_order(self, order: Iterable[Key]) -> None:
        """Everything is answered: lines as `order` has them, others before. Without room for a copy they stay."""
        wanted = dict.fromkeys(order)
        others = [key for key in self._positions if key not in wanted]
        keys = [*others, *(key for key in wanted if key in self._positions)]
        os.fsync(self._fd)
        if keys == list(self._positions):
            return
        try:
            self._replace(keys)
        except OSError as error:
            logger.warning("the lines of %s stay in the order of their answers: %s", self._path, error.strerror)

    def close(self) -> None:
        os.close(self._fd)

    def _read(self) -> list[Key]:
        """Takes what is there, and repairs its end. Returns the keys of failures.

        Raises:
            ConfigError: it is no output of a batch.
        """
        self._positions.clear()
        failed = []
        offset = 0
        with open(os.dup(self._fd), "rb") as file:
            file.seek(0)
            for number, line in enumerate(file, 1):
                try:
                    key, has_failed = read_written(line)
                except ValueError as error:
                    if line.endswith(b"\n"):
                        raise ConfigError(
                            f"line {number} of {self._path} is no answer of a batch ({error}): name another output, "
                            "or let --overwrite replace it"
                        ) from None
                    os.ftruncate(self._fd, offset)
                    break
                if not line.endswith(b"\n"):
                    _write_all(self._fd, b"\n")
                    line += b"\n"
                self._positions[key] = (offset, len(line))
                if has_failed:
                    failed.append(key)
                offset += len(line)
        self._num_failed = len(failed)
        return failed

    def _forget(self, keys: Iterable[Key]) -> None:
        forgotten = set(keys)
        self._replace([key for key in self._positions if key not in forgotten])

    def _replace(self, keys: Iterable[Key]) -> None:
        """A copy with the lines of `keys` takes the file's place: there is a whole file at any time."""
        copy = self._path.with_name(f".{self._path.name}.tokenmill-run-batch")
        try:
            with copy.open("wb") as file:
                os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(self._fd).st_mode))
                file.writelines(self._lines(keys))
                file.flush()
                os.fsync(file.fileno())
            replaced = _locked(copy)
            copy.replace(self._path)
        except BaseException:
            copy.unlink(missing_ok=True)
            raise
        os.close(self._fd)
        self._fd = replaced
        self._read()

    def _lines(self, keys: Iterable[Key]) -> Iterator[bytes]:
        for key in keys:
            offset, size = self._positions[key]
            yield os.pread(self._fd, size, offset)


def _open_locked(path: Path) -> int:
    """A descriptor that reads anywhere and writes at the end. Raises ConfigError."""
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is no file; name one, or - for standard output")
        path.touch()
        return _locked(path)
    except BlockingIOError:
        raise ConfigError(f"another run writes to {path}; wait for its end, or name another output") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _locked(path: Path) -> int:
    """Raises BlockingIOError if another process has the file, or had until now and put another in its place."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino != path.stat().st_ino:
            raise BlockingIOError(errno.EAGAIN, "replaced")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


class Stream:
    """Answers to standard output, or whatever else cannot be read again: in the order of their arrival, and nothing
    to go on with."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._keys: set[Key] = set()
        self._num_failed = 0

    @property
    def num_failed(self) -> int:
        return self._num_failed

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def append(self, answer: Answer) -> None:
        self._file.write(msgspec.json.encode(answer) + b"\n")
        self._file.flush()
        self._keys.add(key_of(answer))
        self._num_failed += answer.error is not None

    def put_in_order(self, order: Iterable[Key]) -> None:
        """Nothing: it was seen already."""

    def close(self) -> None:
        self._file.flush()


Output = Journal | Stream
