import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tokenmill_engine.errors import StartupError
from tokenmill_server.run_dir import RunDir, remove_stale


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


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
