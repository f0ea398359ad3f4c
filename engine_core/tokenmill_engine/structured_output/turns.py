"""Who is compiled when: nobody waits for those that take long.

Each grammar has a short turn first, which nearly all are ready in. The others have a long one after that: one at a
time, or a few while nobody waits for a short one. While long turns are of use, all wait for theirs. Those behind more
of them in a row that were in vain than there may be at once are sent away: their own is likely to be in vain as well.
Turns are counted, not seconds: each has as much processor time, and how long that takes depends on what else goes on.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from tokenmill_engine.config.device import usable_cpus
from tokenmill_engine.errors import NotBegunError
from tokenmill_engine.ipc.priority import give_way
from tokenmill_engine.messages import StructuredSpec

_AT_ONCE: Final = 4
"""Turns."""
_MAX_LONG: Final = 3
"""Of them, while nobody waits for a short one; one less than there are processors, where these are few."""


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
        self._begun: dict[StructuredSpec, bool] = {}
        """Whose short turn is under way, and whether they are still waited for."""
        self._long: OrderedDict[StructuredSpec, int] = OrderedDict()
        """And how many long turns in a row were in vain while they waited."""
        self._max_long = max(1, min(_MAX_LONG, usable_cpus() - 1))
        self._num_long = 0
        """Turns of that kind under way."""
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._is_closed = False

    def join(self, spec: StructuredSpec) -> None:
        """Wait for a short turn, or for what follows the one under way. Raises NotBegunError if the machine allows not
        even one thread."""
        with self._changed:
            if spec in self._begun:
                self._begun[spec] = True
                return
            if len(self._short) >= self._num_idle and len(self._threads) < _AT_ONCE:
                self._start_thread()
            self._short[spec] = None
            self._changed.notify()

    def leave(self, spec: StructuredSpec) -> bool:
        """Wait no more. Returns whether it did. No long turn follows a short one under way, which is finished."""
        with self._changed:
            left = spec in self._short or spec in self._begun or spec in self._long
            self._short.pop(spec, None)
            self._long.pop(spec, None)
            if spec in self._begun:
                self._begun[spec] = False
            return left

    def close(self) -> None:
        """Waits for the turns under way; nobody gets another one."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _start_thread(self) -> None:
        """The others do, if there are any, where no more can be had. Raises as `join`."""
        thread = threading.Thread(target=self._run, name="grammar", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if not self._threads:
                raise NotBegunError(f"grammars cannot be prepared now: {error}") from error
        else:
            self._threads.append(thread)

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
                if is_long:
                    self._num_long -= 1
                    for each, num_vain in self._long.items():
                        self._long[each] = 0 if is_enough else num_vain + 1
                elif self._begun.pop(spec) and not is_enough:
                    self._long[spec] = 0

    def _wait(self) -> tuple[StructuredSpec, bool, bool] | None:
        """The next one, whether its turn is a long one, and whether it is to be sent away; None: no more turns."""
        while not self._is_closed:
            found = self._next()
            if found is not None:
                # There may be more to do: without those that wait for a short turn, more long ones begin.
                self._changed.notify()
                return found
            self._changed.wait()
        return None

    def _next(self) -> tuple[StructuredSpec, bool, bool] | None:
        if self._long:
            spec, num_vain = next(iter(self._long.items()))
            is_late = num_vain > self._max_long
            if is_late or self._num_long < (1 if self._short else self._max_long):
                del self._long[spec]
                self._num_long += not is_late
                return spec, not is_late, is_late
        if self._short:
            spec, _ = self._short.popitem(last=False)
            self._begun[spec] = True
            return spec, False, False
        return None
