"""Messages between an engine core and its worker processes, over one socket pair per worker. Torch-free.

Plans and answers go another way (`wire`). The channel's end of file means that the other side is gone.
"""

import msgspec

from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.outputs import KVCapacity


class WorkerStart(msgspec.Struct, tag=True, frozen=True):
    """The first message to a worker."""

    engine_rank: int
    """The engine core, as titles and logs call it."""
    store_path: str
    """What files begin with that are not there yet, by which the workers of this engine core find each other."""
    config: EngineConfig


class RefusedAlike(msgspec.Struct, tag=True, frozen=True):
    """To a worker that has told of a step that failed: it did on all that were to fail, so the next can follow."""


class WorkerReady(msgspec.Struct, tag=True, frozen=True):
    """From a worker that waits for plans."""

    capacity: KVCapacity


class WorkerFailed(msgspec.Struct, tag=True, frozen=True):
    """From a worker that cannot start."""

    message: str
    """One readable line."""
    at: float
    """Of the monotonic clock: the first one that fails may make others fail."""


ToWorker = WorkerStart | RefusedAlike
FromWorker = WorkerReady | WorkerFailed


def stage_store(store_path: str, stage: int) -> str:
    """The file by which the workers of one stage find each other."""
    return f"{store_path}.stage{stage}"


def chain_store(store_path: str, member: int) -> str:
    """The file by which the workers that have the same part of each stage do."""
    return f"{store_path}.chain{member}"
