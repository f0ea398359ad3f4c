"""Children that do not react, with a real process that is stopped."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tokenmill_engine.ipc.channel import ControlChannel
from tokenmill_engine.ipc.child import ChildProcess
from tokenmill_engine.ipc.control import FromEngine, Ping
from tokenmill_engine.ipc.stopped import STOPPED_S
from tokenmill_server import liveness
from tokenmill_server.liveness import INTERVAL_S, SILENT_S, Liveness

KEY = ("engine", 0)


class Clock:
    """The monotonic clock, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(liveness, "time", clock)
    return clock


@pytest.fixture
def ends() -> Iterator[tuple[ChildProcess[FromEngine], ControlChannel[Ping]]]:
    """A child that does nothing, and the end of its channel that it would read."""
    ours, theirs = socket.socketpair()
    channel: ControlChannel[Ping] = ControlChannel(theirs, Ping)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield ChildProcess(process, ControlChannel(ours, FromEngine)), channel
    process.kill()
    process.wait()
    ours.close()
    theirs.close()


def pass_time(watch: Liveness, clock: Clock, seconds: float) -> list[str]:
    """Looks every second; returns the faults found meanwhile."""
    faults = []
    for _ in range(int(seconds / INTERVAL_S)):
        clock.now += INTERVAL_S
        faults += [fault for _, fault in watch.look()]
    return faults


def test_who_answers_is_asked_again(clock: Clock, ends: tuple[ChildProcess[FromEngine], ControlChannel[Ping]]) -> None:
    child, channel = ends
    watch = Liveness()
    watch.watch(KEY, child.channel, child.process.pid)
    assert pass_time(watch, clock, 2 * SILENT_S) == []
    assert channel.receive_available() == []
    watch.expect_answers(KEY)
    for _ in range(40):
        assert pass_time(watch, clock, 1) == []
        assert channel.receive() == Ping()
        watch.answered(KEY)


def test_who_is_silent_is_given_up_and_asked_once(
    clock: Clock, ends: tuple[ChildProcess[FromEngine], ControlChannel[Ping]]
) -> None:
    child, channel = ends
    watch = Liveness()
    watch.watch(KEY, child.channel, child.process.pid)
    watch.expect_answers(KEY)
    assert pass_time(watch, clock, SILENT_S) == []
    assert pass_time(watch, clock, 2) == ["did not react for 30 s"] * 2
    assert channel.receive_available() == [Ping()]
    watch.forget(KEY)
    assert pass_time(watch, clock, 2) == []


def test_who_is_stopped_is_given_up_soon_unless_it_goes_on(
    clock: Clock, ends: tuple[ChildProcess[FromEngine], ControlChannel[Ping]]
) -> None:
    child, _ = ends
    watch = Liveness()
    watch.watch(KEY, child.channel, child.process.pid)
    for _ in range(2):
        os.kill(child.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.process.pid, os.WSTOPPED | os.WNOWAIT)
        assert pass_time(watch, clock, STOPPED_S) == []
        os.kill(child.process.pid, signal.SIGCONT)
        os.waitid(os.P_PID, child.process.pid, os.WCONTINUED)
        assert pass_time(watch, clock, 1) == []
    os.kill(child.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.process.pid, os.WSTOPPED | os.WNOWAIT)
    assert pass_time(watch, clock, STOPPED_S + 1) == ["was stopped (SIGSTOP) for 5 s"]
    watch.gives_up = False
    assert pass_time(watch, clock, 10) == []


def test_our_own_pause_counts_for_nobody(
    clock: Clock, ends: tuple[ChildProcess[FromEngine], ControlChannel[Ping]]
) -> None:
    child, _ = ends
    watch = Liveness()
    watch.watch(KEY, child.channel, child.process.pid)
    watch.expect_answers(KEY)
    assert pass_time(watch, clock, 1) == []
    before = watch.now
    clock.now += 3600
    assert watch.look() == []
    assert watch.now - before == 2 * INTERVAL_S
