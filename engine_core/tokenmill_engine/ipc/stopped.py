"""When a child that is stopped (SIGSTOP) is given up: it lives, and does nothing. Knows nothing of what to do then."""

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
