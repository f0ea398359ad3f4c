"""Which engine cores have work, but get nothing done.

An engine core that computes answers pings and counts its turns; a turn is at most one step. One that counts no turn for
longer than a bound, though somebody waits for it, is stalled: its device or something in its loop hangs, or its steps
are longer than the bound. So is one that says nothing at all for so long. It may recover. After twice the bound it is
hopeless.
"""

import time
from dataclasses import dataclass

from tokenmill_engine.ipc.control import Pulse


@dataclass(slots=True)
class _Progress:
    num_turns: int
    at: float
    """When it was last seen to get on, on the caller's clock."""
    at_unix: float
    is_stalled: bool = False


class StallDetector:
    """Times are on one clock of the caller's, in seconds. `timeout_s` 0: nothing is ever stalled."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._progress: dict[int, _Progress] = {}

    def heard(self, engine: int, pulse: Pulse, now: float) -> bool:
        """Takes note of what an engine core said; returns whether it was stalled and is not any more."""
        known = self._progress.get(engine)
        if known is not None and pulse.has_work and pulse.num_turns == known.num_turns:
            return False
        self._progress[engine] = _Progress(pulse.num_turns, now, time.time())
        return known is not None and known.is_stalled

    def forget(self, engine: int) -> None:
        """This engine core is gone."""
        self._progress.pop(engine, None)

    def newly_stalled(self, now: float) -> list[tuple[int, float]]:
        """Engine cores that are stalled since the last call, with the Unix time since when they got nothing done."""
        found = []
        for engine, progress in self._progress.items():
            if self.timeout_s and not progress.is_stalled and now - progress.at > self.timeout_s:
                progress.is_stalled = True
                found.append((engine, progress.at_unix))
        return found

    def hopeless(self, now: float) -> list[int]:
        """Engine cores that were stalled for so long that nobody should wait for them."""
        if not self.timeout_s:
            return []
        return [engine for engine, progress in self._progress.items() if now - progress.at > 2 * self.timeout_s]
