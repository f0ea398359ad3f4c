"""Whether this API server takes work: one state, why, and which engine cores are missing."""

import enum

from tokenmill_engine.errors import EngineDeadError, EngineStartingError
from tokenmill_engine.ipc.control import EngineLost
from tokenmill_server.errors import ShuttingDownError


class Phase(enum.StrEnum):
    """The life of an API server."""

    STARTING = "starting"
    """No engine core is there, yet or for the moment."""
    READY = "ok"
    DRAINING = "draining"
    DEAD = "dead"


_TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.STARTING: frozenset({Phase.READY, Phase.DRAINING, Phase.DEAD}),
    Phase.READY: frozenset({Phase.STARTING, Phase.DRAINING, Phase.DEAD}),
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

    def __init__(self, num_engines: int = 1) -> None:
        self.phase = Phase.STARTING
        self.reason = _REASONS[Phase.STARTING]
        self._num_engines = num_engines
        self._joined: set[int] = set()
        self.lost: dict[int, EngineLost] = {}
        """By engine core; those that serve again are not there any more."""

    def move(self, phase: Phase, reason: str | None = None) -> None:
        """Enters `phase`. Raises ValueError for a move that the life of a server does not have."""
        if phase not in _TRANSITIONS[self.phase]:
            raise ValueError(f"no way from {self.phase.name} to {phase.name}")
        self.phase = phase
        self.reason = reason or _REASONS[phase]

    def engine_joined(self, engine: int) -> None:
        """This API server can send requests to `engine`."""
        self._joined.add(engine)
        self.lost.pop(engine, None)
        if self.phase is Phase.STARTING:
            self.move(Phase.READY)

    def engine_lost(self, lost: EngineLost) -> None:
        """An engine core is gone. Without any, nothing is taken; without hope for any, nothing ever will be."""
        self._joined.discard(lost.engine)
        self.lost[lost.engine] = lost
        if self.phase is Phase.DEAD:
            return
        if len(self.lost) == self._num_engines and not any(each.restarts for each in self.lost.values()):
            self.move(Phase.DEAD, lost.message)
        elif not self._joined and self.phase in (Phase.STARTING, Phase.READY):
            self.phase = Phase.STARTING
            self.reason = f"{lost.message}; it is being restarted"

    def check(self) -> None:
        """Raises the error that a request for inference gets now, if any."""
        if self.phase is Phase.STARTING:
            raise EngineStartingError(self.reason)
        if self.phase is Phase.DRAINING:
            raise ShuttingDownError(self.reason)
        if self.phase is Phase.DEAD:
            raise EngineDeadError(self.reason)
