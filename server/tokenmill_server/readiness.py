"""Whether this API server takes work: one state, and why."""

import enum

from tokenmill_engine.errors import EngineDeadError, EngineStartingError
from tokenmill_server.errors import ShuttingDownError


class Phase(enum.StrEnum):
    """The life of an API server."""

    STARTING = "starting"
    READY = "ok"
    DRAINING = "draining"
    DEAD = "dead"


_TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.STARTING: frozenset({Phase.READY, Phase.DRAINING, Phase.DEAD}),
    Phase.READY: frozenset({Phase.DRAINING, Phase.DEAD}),
    Phase.DRAINING: frozenset({Phase.DEAD}),
    Phase.DEAD: frozenset(),
}

_REASONS = {
    Phase.STARTING: "the model is still loading",
    Phase.READY: "",
    Phase.DRAINING: "the server is shutting down",
    Phase.DEAD: "the engine is gone",
}


class Readiness:
    """The phase and the sentence that explains it to clients."""

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self.reason = _REASONS[Phase.STARTING]

    def move(self, phase: Phase, reason: str | None = None) -> None:
        """Enters `phase`. Raises ValueError for a move that the life of a server does not have."""
        if phase not in _TRANSITIONS[self.phase]:
            raise ValueError(f"no way from {self.phase.name} to {phase.name}")
        self.phase = phase
        self.reason = reason or _REASONS[phase]

    def check(self) -> None:
        """Raises the error that a request for inference gets now, if any."""
        if self.phase is Phase.STARTING:
            raise EngineStartingError(self.reason)
        if self.phase is Phase.DRAINING:
            raise ShuttingDownError(self.reason)
        if self.phase is Phase.DEAD:
            raise EngineDeadError(self.reason)
