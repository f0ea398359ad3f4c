import errno
import os
from pathlib import Path

import pytest

from tokenmill_engine.errors import StartupError
from tokenmill_engine.ipc.files import reserve


def test_space_is_taken_and_contents_stay(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    reserve(path, 100_000)
    reserve(path, 10)
    status = path.stat()
    assert status.st_size == 100_000
    assert status.st_blocks * 512 >= 100_000
    assert path.read_bytes() == b"abc" + bytes(99_997)


def test_no_space_is_one_readable_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_fd: int, _offset: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(StartupError, match=f"no space in {tmp_path}: free some or set TMPDIR"):
        reserve(tmp_path / "file", 1)
