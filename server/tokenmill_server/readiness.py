"""Whether this API server takes work: one state, why, and which engine cores are missing."""

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill_engine.errors import EngineDeadError, EngineStartingError
from tokenmill_engine.ipc.control import EngineDraining, EngineLost, EngineRecovered, EngineStalled
from tokenmill_server.data_parallel.ranks import phrase
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


@dataclass(frozen=True, slots=True)
class EngineFault:
    """Why an engine core is not in rotation."""

    engine: int
    status: str
    """restarting, missing, dead, unreachable, draining or stalled."""
    reason: str


class Readiness:
    """The phase and the sentence that explains it to clients."""

    def __init__(self, num_engines: int = 1) -> None:
        self.phase = Phase.STARTING
        self.reason = _REASONS[Phase.STARTING]
        self._num_engines = num_engines
        # An engine core is in one of these at most; in none while it starts or is being connected for the first time.
        self._joined: dict[int, int] = {}
        """By engine core, its incarnation."""
        self._lost: dict[int, EngineLost] = {}
        self._unreachable: dict[int, str] = {}
        """Why, one sentence each."""
        self._draining: dict[int, EngineDraining] = {}
        self._stalled: dict[int, EngineStalled] = {}

    def move(self, phase: Phase, reason: str | None = None) -> None:
        """Enters `phase`. Raises ValueError for a move that the life of a server does not have."""
        if phase not in _TRANSITIONS[self.phase]:
            raise ValueError(f"no way from {self.phase.name} to {phase.name}")
        self.phase = phase
        self.reason = reason or _REASONS[phase]

    def ranks_missing(self, ranks: Sequence[int]) -> None:
        """While the server starts, these are the ranks that no launcher has."""
        if self.phase is Phase.STARTING:
            self.reason = f"no launcher has {phrase(ranks)} yet" if ranks else _REASONS[Phase.STARTING]

    def engine_joined(self, engine: int, incarnation: int) -> None:
        """This API server can send requests to `engine`."""
        self._leave(engine)
        self._joined[engine] = incarnation
        if self.phase is Phase.STARTING:
            self.move(Phase.READY)

    def engine_lost(self, lost: EngineLost) -> None:
        """An engine core is gone. Without any, nothing is taken; without hope for any, nothing ever will be."""
        self._leave(lost.engine)
        self._lost[lost.engine] = lost
        if self.phase is Phase.DEAD:
            return
        if len(self._lost) == self._num_engines and all(each.is_final for each in self._lost.values()):
            self.move(Phase.DEAD, lost.message)
        else:
            self._check_joined()

    def engine_unreachable(self, engine: int, reason: str) -> None:
        """An engine core lives, but this API server is not connected to it: for now it counts as lost."""
        self._leave(engine)
        self._unreachable[engine] = reason
        self._check_joined()

    def engine_drains(self, draining: EngineDraining) -> None:
        """An engine core takes no new requests any more, and is gone soon."""
        self._leave(draining.engine)
        self._draining[draining.engine] = draining
        self._check_joined()

    def engine_stalls(self, change: EngineStalled | EngineRecovered) -> None:
        """An engine core gets nothing done, or does again. Requests are taken all the same. Another incarnation than
        the joined one does not matter."""
        if self._joined.get(change.engine) != change.incarnation:
            return
        if isinstance(change, EngineStalled):
            self._stalled[change.engine] = change
        else:
            self._stalled.pop(change.engine, None)

    def _leave(self, engine: int) -> None:
        for group in (self._joined, self._lost, self._unreachable, self._draining, self._stalled):
            group.pop(engine, None)

    def _check_joined(self) -> None:
        """Without any engine core, requests have to wait for one."""
        if self._joined or self.phase not in (Phase.STARTING, Phase.READY):
            return
        self.phase = Phase.STARTING
        lost = self._lost.values()
        hopes = [f"{each.message}; another launcher may bring it back" for each in self._draining.values()]
        hopes += [f"{each.message}; a launcher that brings it back may join" for each in lost if each.may_return]
        hopes += [f"{each.message}; it is being restarted" for each in lost if each.restarts]
        hopes += self._unreachable.values()
        self.reason = hopes[-1] if hopes else "engine cores are being connected"

    @property
    def engine_faults(self) -> list[EngineFault]:
        """The engine cores that are not in rotation, in their order."""
        faults = [EngineFault(lost.engine, _status_of(lost), lost.message) for lost in self._lost.values()]
        faults += [EngineFault(engine, "unreachable", reason) for engine, reason in self._unreachable.items()]
        faults += [EngineFault(engine, "draining", each.message) for engine, each in self._draining.items()]
        for stalled in self._stalled.values():
            reason = f"it has work but finished no step for {time.time() - stalled.since:.0f} s"
            faults.append(EngineFault(stalled.engine, "stalled", reason))
        return sorted(faults, key=lambda fault: fault.engine)

    @property
    def is_stalled(self) -> bool:
        """Whether requests are taken, but by engine cores that get nothing done."""
        return self.phase is Phase.READY and self._joined.keys() == self._stalled.keys()

    def check(self) -> None:
        """Raises the error that a request for inference gets now, if any."""
        if self.phase is Phase.STARTING:
            raise EngineStartingError(self.reason)
        if self.phase is Phase.DRAINING:
            raise ShuttingDownError(self.reason)
        if self.phase is Phase.DEAD:
            raise EngineDeadError(self.reason)


def _status_of(lost: EngineLost) -> str:
    if lost.restarts:
        return "restarting"
    return "missing" if lost.may_return else "dead"
