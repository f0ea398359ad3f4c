"""Who is compiled when: nobody waits for those that take long.

Each grammar has a short turn first, which nearly all are ready in. The others have a long one after that: one at a
time, or a few while nobody waits for a short one. While long turns are of use, all wait for theirs. Those that have
waited for a while in which none was are sent away: what they wait for is likely to be in vain.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from tokenmill_engine.config.device import usable_cpus
from tokenmill_engine.ipc.priority import give_way
from tokenmill_engine.messages import StructuredSpec

_AT_ONCE: Final = 4
"""Turns."""
_MAX_LONG: Final = 3
"""Of them, while nobody waits for a short one; one less than there are processors, where these are few."""
_MAX_WAIT_S: Final = 2.0
"""For a long turn, while none is of use."""


class Turns:
    """Threads that give turns, started as they are needed. They give way to others, as do processes that they start."""

    def __init__(
        self, take_turn: Callable[[StructuredSpec, bool], bool], send_away: Callable[[StructuredSpec], None]
    ) -> None:
        """Both are called in a thread, `take_turn` with whether the turn is a long one; it returns whether it was
        enough. After a long one nothing follows in any case."""
        self._take_turn, self._send_away = take_turn, send_away
        self._changed = threading.Condition()
        self._short: OrderedDict[StructuredSpec, None] = OrderedDict()
        self._long: OrderedDict[StructuredSpec, float] = OrderedDict()
        """And since when they wait."""
        self._max_long = max(1, min(_MAX_LONG, usable_cpus() - 1))
        self._num_long = 0
        """Turns of that kind under way."""
        self._last_use = 0.0
        """When the last of them ended that was enough."""
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._is_closed = False

    def join(self, spec: StructuredSpec) -> None:
        """Wait for a short turn."""
        with self._changed:
            self._short[spec] = None
            if len(self._short) > self._num_idle and len(self._threads) < _AT_ONCE:
                self._threads.append(threading.Thread(target=self._run, name="grammar", daemon=True))
                self._threads[-1].start()
            self._changed.notify()

    def leave(self, spec: StructuredSpec) -> bool:
        """Wait no more. Returns whether it did, which a turn under way does not."""
        with self._changed:
            left = spec in self._short or spec in self._long
            self._short.pop(spec, None)
            self._long.pop(spec, None)
            return left

    def close(self) -> None:
        """Waits for the turns under way; nobody gets another one."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        give_way()
        while True:
            with self._changed:
                self._num_idle += 1
                found = self._wait()
                self._num_idle -= 1
            if found is None:
                return
            spec, is_long, is_late = found
            if is_late:
                self._send_away(spec)
                continue
            is_enough = self._take_turn(spec, is_long)
            with self._changed:
                self._num_long -= is_long
                if is_long and is_enough:
                    self._last_use = time.monotonic()
                elif not is_long and not is_enough:
                    self._long[spec] = time.monotonic()
                self._changed.notify()

    def _wait(self) -> tuple[StructuredSpec, bool, bool] | None:
        """The next one, whether its turn is a long one, and whether it is to be sent away; None: no more turns."""
        while not self._is_closed:
            left_s = None
            if self._long:
                since = max(self._last_use, next(iter(self._long.values())))
                left_s = since + _MAX_WAIT_S - time.monotonic()
                if left_s <= 0:
                    return self._long.popitem(last=False)[0], False, True
            if self._long and self._num_long < (1 if self._short else self._max_long):
                self._num_long += 1
                return self._long.popitem(last=False)[0], True, False
            if self._short:
                return self._short.popitem(last=False)[0], False, False
            self._changed.wait(left_s)
        return None
