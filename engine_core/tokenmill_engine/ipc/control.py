"""Messages between the launcher and its child processes, over one socket pair per child.

The channel's end of file means that the other side is gone.
"""

import msgspec

from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.messages import EngineReady


class EngineStart(msgspec.Struct, tag=True, frozen=True):
    """First message to an engine core. Its sockets are `engine-<engine>.in` and `.out` in `run_dir`."""

    engine: int
    run_dir: str
    config: EngineConfig
    began: float
    """Of the monotonic clock, in seconds: when the user's command, or call, began."""


class StartFailed(msgspec.Struct, tag=True, frozen=True):
    """From a child that cannot start: one readable line."""

    message: str


class EnginesReady(msgspec.Struct, tag=True, frozen=True):
    """To every API server once all engine cores are ready (and again to a restarted API server)."""

    engines: list[EngineReady]


class EngineDied(msgspec.Struct, tag=True, frozen=True):
    """To every API server: this engine is gone; fail what it owned."""

    engine: int
    message: str


class Drain(msgspec.Struct, tag=True, frozen=True):
    """To every API server: take no new work, finish what is open within `timeout_s`, then answer Drained and exit.
    A second one: cut off what is still open, now."""

    timeout_s: float


class Listening(msgspec.Struct, tag=True, frozen=True):
    """From an API server: it accepts connections."""


class Serving(msgspec.Struct, tag=True, frozen=True):
    """From an API server: it is connected to every engine core and answers requests."""


class Drained(msgspec.Struct, tag=True, frozen=True):
    """From an API server: nothing is open any more."""

    num_cut_off: int = 0
    """HTTP requests that were not finished in time."""


EngineControl = EngineStart
FromEngine = EngineReady | StartFailed
ToApiServer = EnginesReady | EngineDied | Drain
FromApiServer = Listening | Serving | Drained | StartFailed
