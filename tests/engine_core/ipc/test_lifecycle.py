"""Children end with their parent, whatever either of them is doing, and leave nothing behind."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.orphans import Child
from tests.support.processes import wait_for_end
from tokenmill_engine.ipc.channel import ChannelClosedError
from tokenmill_engine.ipc.child import spawn_child
from tokenmill_engine.ipc.control import Drained, Listening, Ping
from tokenmill_engine.ipc.signals import END_SIGNAL, OUTSIDE_SIGNALS


@contextmanager
def family(mode: str, run_dir: Path) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A parent and its child; both are gone afterwards."""
    command = [sys.executable, "-m", "tests.support.orphans", "--mode", mode, "--run-dir", str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        try:
            yield parent, child
        finally:
            parent.kill()
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


@pytest.mark.parametrize("mode", ["idle", "deaf", "unwatched"])
def test_a_child_ends_when_its_parent_is_killed(mode: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with family(mode, run_dir) as (parent, child):
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        wait_for_end(child)
    if mode == "deaf":
        assert not run_dir.exists()


def test_a_child_that_cannot_listen_to_its_parent_any_more_ends(tmp_path: Path) -> None:
    with family("fails", tmp_path) as (_, child):
        wait_for_end(child)


def test_a_child_has_a_title_and_a_group_of_its_own(tmp_path: Path) -> None:
    with family("idle", tmp_path) as (parent, child):
        assert child.cmdline()[0].startswith("tokenmill: test orphan")
        assert os.getpgid(child.pid) != os.getpgid(parent.pid)


def test_a_child_leaves_signals_from_outside_to_the_launcher_from_its_first_moment(tmp_path: Path) -> None:
    child: Child = spawn_child(
        "tests.support.orphans", Listening | Drained, args=["--mode", "idle", "--run-dir", str(tmp_path)]
    )
    try:
        for answer in (Listening, Drained):  # the interpreter has not begun yet; the child waits
            for number in OUTSIDE_SIGNALS:
                child.process.send_signal(number)
            if answer is Drained:
                child.channel.send(Ping())
            assert isinstance(child.channel.receive(), answer)
        child.process.send_signal(END_SIGNAL)
        assert child.process.wait(timeout=60) == -END_SIGNAL
    finally:
        child.process.kill()
        child.process.wait()
        child.channel.close()


def test_a_child_whose_parent_was_gone_before_it_began_exits_at_once(tmp_path: Path) -> None:
    arguments = ["--mode", "idle", "--run-dir", str(tmp_path), "--parent-pid", "1"]
    child: Child = spawn_child("tests.support.orphans", Listening | Drained, args=arguments)
    assert child.process.wait(timeout=60) == 1
    with pytest.raises(ChannelClosedError):
        child.channel.receive()
    child.channel.close()


ORPHAN = """
import shutil, sys
from pathlib import Path
from tokenmill_engine.ipc import lifecycle
remove, folder = shutil.rmtree, Path(sys.argv[1])

def remove_and_write(path, **options):
    remove(path, **options)
    lifecycle.shutil.rmtree = remove
    folder.mkdir()
    (folder / "file").touch()

lifecycle.shutil.rmtree = remove_and_write
lifecycle.exit_orphaned(str(folder))
"""


def test_a_folder_that_gets_a_file_while_it_is_removed_goes_all_the_same(tmp_path: Path) -> None:
    """Other threads do not know yet that the end has come."""
    folder = tmp_path / "run"
    folder.mkdir()
    assert subprocess.run([sys.executable, "-c", ORPHAN, str(folder)], check=False).returncode == 1
    assert not folder.exists()
