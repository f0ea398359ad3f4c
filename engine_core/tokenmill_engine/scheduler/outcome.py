"""What a retired step means for the requests in it, before it is packed for the API servers."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.outputs import LogprobRows
from tokenmill_engine.request import Request
from tokenmill_engine.scheduler.slots import IntArray
from tokenmill_engine.scheduler.stopping import Stop


@dataclass(slots=True, frozen=True)
class StepOutcome:
    """Entries are the requests that have something to tell; `entry` below is an index into `request_ids`."""

    request_ids: NDArray[np.int64]
    """[num_entries]"""
    num_tokens: IntArray
    """[num_entries] new tokens of each, possibly 0."""
    token_ids: IntArray
    """[sum(num_tokens)]"""
    finished: dict[int, tuple[Request, Stop]] = field(default_factory=dict)
    """By entry."""
    logprobs: dict[int, LogprobRows] = field(default_factory=dict)
    prompt_logprobs: dict[int, LogprobRows] = field(default_factory=dict)
    prefilled: dict[int, Request] = field(default_factory=dict)
    """Entries whose prompt is complete for the first time."""
    vectors: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    """By entry."""


def slice_logprobs(rows: LogprobRows, start: int, end: int) -> LogprobRows:
    """Positions `start` .. `end` - 1."""
    return LogprobRows(rows.token_ids[start:end], rows.logprobs[start:end], rows.ranks[start:end])
