"""What a retired step means for the requests in it, before it is packed for the API servers."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.outputs import LogprobRows, StepPlan, StepResult
from tokenmill_engine.request import Request
from tokenmill_engine.scheduler.slots import IntArray, SlotTable
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


def new_prompt_logprobs(
    table: SlotTable, plan: StepPlan, result: StepResult, rows: Iterable[int]
) -> dict[int, LogprobRows]:
    """By row, those of the positions that were not sent before (a preempted prompt is computed twice); they count as
    sent now."""
    if not result.prompt_logprobs:
        return {}
    pieces = {}
    for row in rows:
        piece = result.prompt_logprobs.get(row)
        if piece is None:
            continue
        request = table.request(int(plan.slots[row]))
        known = request.num_prompt_logprobs - int(plan.num_computed[row])
        piece = slice_logprobs(piece, max(known, 0), len(piece.ranks))
        if len(piece.ranks):
            request.num_prompt_logprobs += len(piece.ranks)
            pieces[int(row)] = piece
    return pieces
