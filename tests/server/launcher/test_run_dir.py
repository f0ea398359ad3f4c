import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tokenmill_engine.errors import StartupError
from tokenmill_server.run_dir import RunDir, remove_stale


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Sockets have short names."""
    with tempfile.TemporaryDirectory(prefix="tm-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_private_and_gone_afterwards(temporary: Path) -> None:
    with RunDir() as run_dir:
        assert run_dir.path.parent == temporary
        assert run_dir.path.stat().st_mode & 0o777 == 0o700
        assert run_dir.metrics.is_dir()
        (run_dir.path / "engine-0.in").touch()
    assert list(temporary.iterdir()) == []
    run_dir.close()


def test_folders_in_use_stay_others_go(temporary: Path) -> None:
    script = "import os, tempfile; from tokenmill_server.run_dir import RunDir; print(RunDir().path); os._exit(1)"
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"TMPDIR": str(temporary)}, stdout=subprocess.PIPE, check=False
    )
    left_by_a_killed_server = Path(done.stdout.decode().strip())
    foreign = temporary / "tokenmill-2026-notes"
    foreign.mkdir()
    assert left_by_a_killed_server.is_dir()
    with RunDir() as first, RunDir() as second:
        assert not left_by_a_killed_server.exists()
        assert first.path.is_dir()
        assert second.path.is_dir()
    assert foreign.is_dir()


def folder_of(temporary: Path, pid: int, modified_at: float) -> Path:
    """A folder that nobody has locked, as other versions or other file systems may leave it."""
    folder = temporary / f"tokenmill-{pid}-01234567"
    folder.mkdir()
    os.utime(folder, (modified_at, modified_at))
    return folder


def test_the_folder_of_a_running_owner_stays_without_a_lock(temporary: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as owner:
        started_at = psutil.Process(owner.pid).create_time()
        in_use = folder_of(temporary, owner.pid, started_at + 1)
        remove_stale(temporary)
        assert in_use.is_dir()
        os.utime(in_use, (started_at - 100, started_at - 100))  # the number was given to another process since
        remove_stale(temporary)
        assert not in_use.exists()
        owner.kill()


def test_the_folder_of_a_dead_owner_stays_while_it_is_locked(temporary: Path) -> None:
    """The owner may live in another container, where numbers of processes mean nothing to us."""
    folder = folder_of(temporary, 2**22 - 1, 0)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    remove_stale(temporary)
    assert folder.is_dir()
    os.close(lock)
    remove_stale(temporary)
    assert not folder.exists()


def test_without_locks_nothing_is_removed(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_fd: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    folder = folder_of(temporary, 2**22 - 1, 0)
    monkeypatch.setattr(fcntl, "flock", refuse)
    remove_stale(temporary)
    assert folder.is_dir()


def test_sweeping_ignores_what_is_not_a_folder_of_ours(temporary: Path, tmp_path: Path) -> None:
    file, link = temporary / "tokenmill-1-00000000", temporary / "tokenmill-1-00000001"
    file.touch()
    link.symlink_to(tmp_path)
    remove_stale(temporary)
    assert file.exists()
    assert link.is_symlink()
    assert temporary.is_dir()


def test_unusable_folders(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / ("x" * 90)))
    with pytest.raises(StartupError, match="set TMPDIR to a shorter one"):
        RunDir()
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    with pytest.raises(StartupError, match="set TMPDIR to a writable folder"):
        RunDir()
