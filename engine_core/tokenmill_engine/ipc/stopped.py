"""When a child that is stopped (SIGSTOP) is given up: it lives, and does nothing. Knows nothing of what to do then."""

import time
from collections.abc import Iterator, Sequence

from tokenmill_engine.ipc.child import is_stopped

LOOK_S = 1.0
"""Between two looks at a child."""
STOPPED_S = 5.0
"""A child that is stopped for longer is given up."""


class StoppedChild:
    """What is known of one child, which may go on at any time."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._since: float | None = None

    def look(self, now: float) -> str | None:
        """What is wrong with it, as the predicate of a sentence. `now`, in seconds, is of a clock of the caller's that
        stands still while the caller does: what was stopped together with it is not blamed for that."""
        if not is_stopped(self._pid):
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since >= STOPPED_S:
            return f"was stopped (SIGSTOP) for {STOPPED_S:.0f} s"
        return None


class StoppedChildren:
    """Looks at children once in a while, for who waits for something else meanwhile."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._children = [StoppedChild(pid) for pid in pids]
        self._looked_at = time.monotonic()
        self._now = 0.0

    @property
    def next_look(self) -> float | None:
        """When `look` has something to do, of the monotonic clock; None: never."""
        return self._looked_at + LOOK_S if self._children else None

    def look(self) -> Iterator[tuple[int, str]]:
        """Those that have been stopped for long, by their place, and what is wrong, as `StoppedChild.look` says it."""
        since_s = time.monotonic() - self._looked_at
        if since_s < LOOK_S:
            return
        self._looked_at += since_s
        # This process may have been stopped as well.
        self._now += min(since_s, 2 * LOOK_S)
        for index, child in enumerate(self._children):
            if (fault := child.look(self._now)) is not None:
                yield index, fault
