"""Children that are stopped for a while or for long, with a real process."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tokenmill_engine.ipc.stopped import STOPPED_S, StoppedChild


@pytest.fixture
def pid() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    yield process.pid
    process.kill()
    process.wait()


def test_who_is_stopped_for_long_is_given_up_and_who_goes_on_is_not(pid: int) -> None:
    child = StoppedChild(pid)
    assert child.look(0.0) is None
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    assert [child.look(now) for now in (1.0, 2.0, 0.9 + STOPPED_S)] == [None] * 3
    os.kill(pid, signal.SIGCONT)
    os.waitid(os.P_PID, pid, os.WCONTINUED)
    assert child.look(1.0 + STOPPED_S) is None
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    assert child.look(50.0) is None
    assert child.look(50.0 + STOPPED_S) == "was stopped (SIGSTOP) for 5 s"


def test_who_is_gone_is_not_stopped(pid: int) -> None:
    child = StoppedChild(pid)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert [child.look(now) for now in (0.0, 100.0)] == [None, None]
