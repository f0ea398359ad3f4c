"""Waits for what child processes say, for their ends, for signals and for other sockets: one selector, no polling.

Knows nothing of what the children are. One thread uses a watcher; an event loop may watch its `fileno()`.
"""

import os
import selectors
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn, Protocol

from tokenmill_engine.ipc.channel import ChannelClosedError
from tokenmill_engine.ipc.child import ChildProcess

ChildKey = tuple[str, int]
"""Kind and number of a child, or of something else that is watched."""


class HasFileno(Protocol):
    """Something that the selector can watch."""

    def fileno(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Said:
    """A child sent a message."""

    key: ChildKey
    message: Any


@dataclass(frozen=True, slots=True)
class Exited:
    """A child is gone and reaped. `returncode` is negative for a signal, as in `subprocess`."""

    key: ChildKey
    returncode: int
    pid: int


@dataclass(frozen=True, slots=True)
class Signalled:
    """This process got a signal."""

    number: signal.Signals


@dataclass(frozen=True, slots=True)
class Readable:
    """A file or socket that was given to `watch` has something to read, or has ended."""

    key: ChildKey


Event = Said | Exited | Signalled | Readable


class Watcher:
    """Children by key. After a child's last message comes exactly one `Exited`, then it is forgotten."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._children: dict[ChildKey, ChildProcess[Any]] = {}
        self._pidfds: dict[ChildKey, int] = {}
        self._talking: set[ChildKey] = set()
        """Children whose channel is watched: it has not come to its end of file."""
        self._wakeup: tuple[socket.socket, socket.socket] | None = None

    def __enter__(self) -> "Watcher":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Readable whenever `wait(0)` has something to return."""
        fileno = getattr(self._selector, "fileno", None)
        if fileno is None:
            raise OSError("this platform's selector cannot be watched")
        return int(fileno())

    def add(self, key: ChildKey, child: ChildProcess[Any]) -> None:
        """Watches a running child."""
        pidfd = os.pidfd_open(child.process.pid)
        self._children[key] = child
        self._pidfds[key] = pidfd
        self._selector.register(pidfd, selectors.EVENT_READ, key)
        self._selector.register(child.channel, selectors.EVENT_READ, key)
        self._talking.add(key)

    def watch(self, source: HasFileno, key: ChildKey) -> None:
        """`Readable` events, until `unwatch`, for as long as nobody reads what is there."""
        self._selector.register(source, selectors.EVENT_READ, Readable(key))

    def unwatch(self, source: HasFileno) -> None:
        """No more events about `source`, which is still open."""
        self._selector.unregister(source)

    def watch_signals(self, numbers: Iterable[signal.Signals], restore: bool = True) -> "WatchedSignals":
        """Within the returned context these signals become `Signalled` events. Main thread only. After it their
        earlier handlers are back, or, without `restore`, they are ignored: the process ends anyway."""
        return WatchedSignals(self._selector, numbers, restore)

    def wait(self, timeout_s: float | None) -> list[Event]:
        """Blocks until something happened, or for `timeout_s` seconds (None: for ever)."""
        events: list[Event] = []
        exited: list[ChildKey] = []
        for selected, _ in self._selector.select(timeout_s):
            if isinstance(selected.data, WatchedSignals):
                events += selected.data.pending()
            elif isinstance(selected.data, Readable):
                events.append(selected.data)
            elif selected.fd == self._pidfds.get(selected.data):
                exited.append(selected.data)
            else:
                events += self._messages(selected.data)
        for key in exited:
            events += self._messages(key)
            events.append(self._forget(key))
        return events

    def _messages(self, key: ChildKey) -> list[Event]:
        """What the child has sent; after its end of file the channel is watched no longer."""
        child = self._children[key]
        events: list[Event] = []
        try:
            while messages := child.channel.receive_available():
                events += [Said(key, message) for message in messages]
        except ChannelClosedError:
            self._stop_listening(key)
        return events

    def _stop_listening(self, key: ChildKey) -> None:
        if key in self._talking:
            self._talking.remove(key)
            self._selector.unregister(self._children[key].channel)

    def _forget(self, key: ChildKey) -> Exited:
        self._stop_listening(key)
        child, pidfd = self._children.pop(key), self._pidfds.pop(key)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        child.channel.close()
        return Exited(key, child.process.wait(), child.process.pid)

    def close(self) -> None:
        """Stops watching and closes our ends of the channels, which tells children that still run to end."""
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        for child in self._children.values():
            child.channel.close()
        self._pidfds.clear()
        self._children.clear()
        self._selector.close()


class WatchedSignals:
    """Turns signals into readable bytes while the context is entered."""

    def __init__(self, selector: selectors.BaseSelector, numbers: Iterable[signal.Signals], restore: bool) -> None:
        self._selector = selector
        self._numbers = tuple(numbers)
        self._restore = restore
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "WatchedSignals":
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in self._numbers:
            self._previous[number] = signal.signal(number, _ignore)
        self._selector.register(self._reader, selectors.EVENT_READ, self)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler if self._restore else signal.SIG_IGN)
        signal.set_wakeup_fd(self._previous_fd)
        self._selector.unregister(self._reader)
        self._reader.close()
        self._writer.close()

    def pending(self) -> list[Signalled]:
        """The signals that arrived."""
        try:
            return [Signalled(signal.Signals(number)) for number in self._reader.recv(4096)]
        except BlockingIOError:
            return []

    @contextmanager
    def handled_by(self, handle: Callable[[signal.Signals], NoReturn]) -> Iterator[None]:
        """For work that does not wait for events: meanwhile a signal, also one that arrived and was not waited for
        yet, calls `handle` in the main thread, between two instructions of whatever runs there."""
        for number in self._numbers:
            signal.signal(number, lambda number, _frame: handle(signal.Signals(number)))
        try:
            for signalled in self.pending():
                handle(signalled.number)
            yield
        finally:
            for number in self._numbers:
                signal.signal(number, _ignore)


def _ignore(number: int, frame: FrameType | None) -> None:
    """A handler must be there for the wake-up descriptor to be written."""
