"""Messages between the launcher and its child processes, over one socket pair per child.

The channel's end of file means that the other side is gone.
"""

import msgspec

from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.messages import Endpoints, EngineReady


class EngineStart(msgspec.Struct, tag=True, frozen=True):
    """First message to an engine core."""

    engine: int
    incarnation: int
    """How often this rank was started before."""
    run_dir: str
    bind: Endpoints
    """Where to bind its sockets. The system chooses a TCP port that is `*`; `EngineReady` tells which."""
    config: EngineConfig
    began: float
    """Of the monotonic clock, in seconds: when the user's command, or call, began."""
    removes_run_dir: bool = False
    """Whether nobody else is there who would remove `run_dir` when the launcher is killed: no API server."""
    gives_up: bool = False
    """Whether a worker that is stopped for long is the end."""


class StartFailed(msgspec.Struct, tag=True, frozen=True):
    """From a child that cannot start: one readable line."""

    message: str


class EngineFailed(msgspec.Struct, tag=True, frozen=True):
    """From an engine core that was ready and cannot go on; it ends now."""

    message: str
    """Why, as one sentence."""


class EngineLost(msgspec.Struct, tag=True, frozen=True):
    """To every API server: this engine core is gone; what it owned fails."""

    engine: int
    incarnation: int
    message: str
    """Why, as one sentence."""
    restarts: bool = False
    """Whether another incarnation of it is about to start; `EngineBack` tells when it is there."""
    may_return: bool = False
    """Nobody starts it again, but a headless launcher that has its rank may join."""
    planned: bool = False
    """Its launcher was told to stop."""

    @property
    def is_final(self) -> bool:
        """Whether it never comes back."""
        return not (self.restarts or self.may_return)


class EngineStalled(msgspec.Struct, tag=True, frozen=True):
    """To every API server: this engine core has work, but has got nothing done for long. It may yet."""

    engine: int
    incarnation: int
    since: float
    """Unix time of its last sign of progress."""


class EngineRecovered(msgspec.Struct, tag=True, frozen=True):
    """To every API server: a stalled engine core gets work done again."""

    engine: int
    incarnation: int


class EngineDraining(msgspec.Struct, tag=True, frozen=True):
    """To every API server: send no new requests to this engine core, whose launcher was told to stop. What is open
    there goes on; answer EngineDrained once nothing is."""

    engine: int
    incarnation: int
    message: str
    """Why, as one sentence."""


class EngineBack(msgspec.Struct, tag=True, frozen=True):
    """To every API server: a lost engine core was restarted and serves again."""

    engine: EngineReady


class EnginesReady(msgspec.Struct, tag=True, frozen=True):
    """To every API server once all engine cores are ready, and to a restarted API server: who is there, who is not."""

    engines: list[EngineReady]
    """Those that take requests."""
    lost: list[EngineLost] = []
    stalled: list[EngineStalled] = []
    """Those of `engines` that are."""
    draining: list[EngineDraining] = []
    """Those that are none of `engines` any more."""


class RanksMissing(msgspec.Struct, tag=True, frozen=True):
    """To every API server of a head that starts, whenever it changes, and to a restarted one."""

    ranks: list[int]
    """Those that no launcher has, ascending."""


class Ping(msgspec.Struct, tag=True, frozen=True):
    """To a child that is ready: answer with a Pulse at once, from where nothing that takes long is done."""


class Pulse(msgspec.Struct, tag=True, frozen=True):
    """The answer to a Ping: whoever gives it is alive. An engine core also tells what it gets done."""

    num_turns: int = 0
    """Turns of the busy loop since the start; a step is one."""
    has_work: bool = False
    """Whether the current turn has to end for somebody who waits."""


class Drain(msgspec.Struct, tag=True, frozen=True):
    """To every API server: take no new work, finish what is open within `timeout_s`, then answer Drained and exit.
    A second one: cut off what is still open, now."""

    timeout_s: float


class Listening(msgspec.Struct, tag=True, frozen=True):
    """From an API server: it accepts connections."""


class Serving(msgspec.Struct, tag=True, frozen=True):
    """From an API server: it answers requests, connected to every engine core that it could reach within seconds."""


class Drained(msgspec.Struct, tag=True, frozen=True):
    """From an API server: nothing is open any more."""

    num_cut_off: int = 0
    """HTTP requests that were not finished in time."""


class EngineDrained(msgspec.Struct, tag=True, frozen=True):
    """From an API server, in answer to EngineDraining: nothing of its own is open there, and nothing will be."""

    engine: int
    incarnation: int


class MetricsWanted(msgspec.Struct, tag=True, frozen=True):
    """From an API server: somebody asks for the metrics of all engine cores, and some are on other machines."""

    number: int


class MetricsFetched(msgspec.Struct, tag=True, frozen=True):
    """To an API server, in answer to `MetricsWanted` of this number: they are where those of this machine are."""

    number: int


EngineControl = EngineStart | Ping
FromEngine = EngineReady | Pulse | StartFailed | EngineFailed
EngineNews = EnginesReady | EngineLost | EngineStalled | EngineRecovered | EngineDraining | EngineBack | RanksMissing
ToApiServer = EngineNews | MetricsFetched | Ping | Drain
FromApiServer = Listening | Serving | MetricsWanted | Pulse | EngineDrained | Drained | StartFailed
