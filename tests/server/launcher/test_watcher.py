"""With real child processes: the echo child below sends back what it is told, or ends as it is told."""

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

import msgspec
import pytest

from tokenmill_engine.ipc.channel import ControlChannel
from tokenmill_engine.ipc.child import ChildProcess, spawn_child
from tokenmill_engine.ipc.signals import END_SIGNAL
from tokenmill_server import children
from tokenmill_server.children import stop_children, watch_child
from tokenmill_server.watcher import Event, Exited, Said, Signalled, Watcher


class Line(msgspec.Struct, tag=True, frozen=True):
    text: str


def echo() -> None:
    """The child: what it is told comes back twice; `exit N` and `stubborn` are orders."""
    channel: ControlChannel[Line] = ControlChannel.from_fd(int(sys.argv[sys.argv.index("--control-fd") + 1]), Line)
    while True:
        text = channel.receive().text
        if text.startswith("exit"):
            channel.send(Line("last words"))
            os._exit(int(text.split()[1]))
        channel.send(Line(text))
        channel.send(Line(text))
        if text == "stubborn":
            signal.signal(END_SIGNAL, signal.SIG_IGN)
            channel.send(Line("deaf"))
            time.sleep(600)


if __name__ == "__main__":
    echo()


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    watcher = Watcher()
    yield watcher
    watcher.close()


@pytest.fixture
def child(watcher: Watcher) -> Iterator[ChildProcess[Line]]:
    child: ChildProcess[Line] = spawn_child(__name__, Line)
    watcher.add(("echo", 3), child)
    yield child
    stop_children([child])


def collect(watcher: Watcher, count: int, timeout_s: float = 60) -> list[Event]:
    events: list[Event] = []
    deadline = time.monotonic() + timeout_s
    while len(events) < count and time.monotonic() < deadline:
        events += watcher.wait(deadline - time.monotonic())
    return events


def test_messages_then_exit(watcher: Watcher, child: ChildProcess[Line]) -> None:
    child.channel.send(Line("a"))
    assert collect(watcher, 2) == [Said(("echo", 3), Line("a"))] * 2
    child.channel.send(Line("exit 7"))
    assert collect(watcher, 2) == [Said(("echo", 3), Line("last words")), Exited(("echo", 3), 7, child.process.pid)]
    assert watcher.wait(0.05) == []


def test_a_killed_child(watcher: Watcher, child: ChildProcess[Line]) -> None:
    child.process.kill()
    assert collect(watcher, 1) == [Exited(("echo", 3), -9, child.process.pid)]


def test_a_stubborn_child_is_killed(watcher: Watcher, child: ChildProcess[Line]) -> None:
    child.channel.send(Line("stubborn"))
    collect(watcher, 3)
    stop_children([child])
    assert child.process.returncode == -9
    assert collect(watcher, 1) == [Exited(("echo", 3), -9, child.process.pid)]


@pytest.mark.slow
def test_a_child_that_not_even_a_kill_ends_is_left_behind(
    child: ChildProcess[Line], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that hangs in the kernel."""
    child.channel.send(Line("stubborn"))
    for _ in range(3):
        child.channel.receive()
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", lambda pid, number: None)
        patch.setattr(children, "_KILL_GRACE_S", 0.5)
        stop_children([child])
    assert child.process.returncode is None
    assert f"process {child.process.pid} does not end" in caplog.text


def test_a_child_that_cannot_be_watched_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    child: ChildProcess[Line] = spawn_child(__name__, Line)
    monkeypatch.setattr(os, "pidfd_open", refuse)
    with Watcher() as watcher, pytest.raises(OSError, match="Too many open files"):
        watch_child(watcher, ("echo", 3), child)
    assert child.process.returncode is not None


def test_signals_and_their_handlers_afterwards(watcher: Watcher) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with watcher.watch_signals([signal.SIGTERM]):
        os.kill(os.getpid(), signal.SIGTERM)
        assert collect(watcher, 1) == [Signalled(signal.SIGTERM)]
        assert watcher.wait(0) == []
    assert signal.getsignal(signal.SIGTERM) is before


class EndedError(Exception):
    """Raised by a handler."""


def end(number: signal.Signals) -> NoReturn:
    raise EndedError(number.name)


def test_signals_can_be_handled_where_nobody_waits_for_events(watcher: Watcher) -> None:
    with watcher.watch_signals([signal.SIGTERM]) as signals:
        with pytest.raises(EndedError, match="SIGTERM"), signals.handled_by(end):
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        assert watcher.wait(0) == [Signalled(signal.SIGTERM)]
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(EndedError, match="SIGTERM"), signals.handled_by(end):
            pytest.fail("a signal from before was not handled")
        os.kill(os.getpid(), signal.SIGTERM)
        assert collect(watcher, 1) == [Signalled(signal.SIGTERM)]


def test_an_event_loop_can_watch_it(watcher: Watcher, child: ChildProcess[Line]) -> None:
    import select

    assert select.select([watcher.fileno()], [], [], 0.05)[0] == []
    child.channel.send(Line("a"))
    assert select.select([watcher.fileno()], [], [], 60)[0] == [watcher.fileno()]
