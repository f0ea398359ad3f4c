"""Finds processes that live but do not react: stopped ones, and those whose answering thread hangs.

Knows nothing of what they do. One that is busy answers all the same; a stopped child (SIGSTOP) cannot, and its state
tells, so it is found sooner than one that is merely slow: a machine that swaps may hold one up for long. Of a process
on another machine there is only its silence.
"""

import time
from dataclasses import dataclass
from typing import Any

from tokenmill_engine.ipc.channel import ChannelClosedError, ControlChannel
from tokenmill_engine.ipc.control import Ping
from tokenmill_engine.ipc.stopped import LOOK_S, StoppedChild
from tokenmill_server.watcher import ChildKey

INTERVAL_S = LOOK_S
"""Between two looks at everybody."""
SILENT_S = 30.0
"""Who does not answer for longer is given up."""


@dataclass(slots=True)
class _Watched:
    channel: ControlChannel[Any]
    child: StoppedChild | None
    """None: it is on another machine, or may be."""
    answers: bool = False
    asked_at: float | None = None
    """When the ping was sent that is not answered yet."""


class Liveness:
    """Looks at processes from time to time. Its clock stands still while this process does: what was stopped together
    with it, or slept with the machine, is not blamed for that."""

    def __init__(self, gives_up: bool = True) -> None:
        self.gives_up = gives_up
        """False: whoever hangs may do so for ever, as under a debugger."""
        self.now = 0.0
        """Seconds that this process has run since the beginning, as far as it looked."""
        self._looked_at = time.monotonic()
        self._watched: dict[ChildKey, _Watched] = {}

    @property
    def next_look(self) -> float:
        """When to look again, on the monotonic clock."""
        return self._looked_at + INTERVAL_S

    def watch(self, key: ChildKey, channel: ControlChannel[Any], pid: int | None = None) -> None:
        """Looks at a process from now on: a child, or what is at the other end of a connection. It need not answer
        yet."""
        self._watched[key] = _Watched(channel, None if pid is None else StoppedChild(pid))

    def expect_answers(self, key: ChildKey) -> None:
        """It is ready: it is pinged from now on."""
        self._watched[key].answers = True

    def answered(self, key: ChildKey) -> None:
        """It has said something."""
        if key in self._watched:
            self._watched[key].asked_at = None

    def forget(self, key: ChildKey) -> None:
        """It is gone."""
        self._watched.pop(key, None)

    def look(self) -> list[tuple[ChildKey, str]]:
        """Takes a look if it is time, and pings who has answered. Returns who is to be given up, each with what it
        did, as the predicate of a sentence."""
        now = time.monotonic()
        if now < self.next_look:
            return []
        self.now += min(now - self._looked_at, 2 * INTERVAL_S)
        self._looked_at = now
        if not self.gives_up:
            return []
        return [(key, fault) for key, watched in self._watched.items() if (fault := self._look_at(watched)) is not None]

    def _look_at(self, watched: _Watched) -> str | None:
        if watched.child is not None and (fault := watched.child.look(self.now)) is not None:
            return fault
        if watched.asked_at is not None:
            return f"did not react for {SILENT_S:.0f} s" if self.now - watched.asked_at >= SILENT_S else None
        if watched.answers:
            try:
                watched.channel.send(Ping())
                watched.asked_at = self.now
            except ChannelClosedError:
                watched.answers = False  # its end will be noticed
        return None
