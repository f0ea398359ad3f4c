"""Takes the tokens of a retired step into the slot table and finds out which requests they end."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.messages import FinishReason
from tokenmill_engine.request import Request
from tokenmill_engine.scheduler.slots import IntArray, SlotTable


@dataclass(slots=True, frozen=True)
class Stop:
    """Why a request ended; `token_id` is the entry of its own `stop_token_ids` that was met."""

    reason: FinishReason
    token_id: int | None = None
    message: str | None = None


def append_tokens(
    table: SlotTable, slots: IntArray, token_ids: IntArray, num_new: IntArray, eos_token_ids: tuple[int, ...]
) -> tuple[IntArray, dict[int, Stop]]:
    """Append row i's first `num_new[i]` tokens of `token_ids` [num_rows, max_new] to slot `slots[i]`.

    Tokens after the one that ends a request are dropped. Returns how many each row kept, int32 [num_rows], and the
    rows that ended.
    """
    kept = np.zeros(len(slots), dtype=np.int32)
    stops: dict[int, Stop] = {}
    for column in range(token_ids.shape[1]):
        rows = (num_new > column).nonzero()[0]
        if stops:
            rows = rows[~np.isin(rows, list(stops))]
        position = table.num_outputs[slots[rows]]
        room = position < table.max_outputs[slots[rows]]
        if not room.all():
            stops.update((row, _stop_without_room(table.request(slots[row]))) for row in rows[~room].tolist())
            rows, position = rows[room], position[room]
        if len(rows) == 0:
            break
        tokens = token_ids[rows, column]
        table.outputs[slots[rows], position] = tokens
        table.num_outputs[slots[rows]] = position + 1
        kept[rows] += 1
        stops.update(_find_stops(table, rows, slots[rows], tokens, eos_token_ids))
    return kept, stops


def _stop_without_room(request: Request) -> Stop:
    """Of a request that keeps no token."""
    return Stop(FinishReason.STOP if request.makes_vector else FinishReason.LENGTH)


def _find_stops(
    table: SlotTable, rows: NDArray[np.intp], slots: IntArray, tokens: IntArray, eos_token_ids: tuple[int, ...]
) -> dict[int, Stop]:
    """Rows whose last token ended them. Only candidates are looked at one by one."""
    at_eos = np.zeros(len(rows), dtype=np.bool_)
    for token_id in eos_token_ids:
        at_eos |= tokens == token_id
    at_eos &= table.stops_at_eos[slots]
    at_limit = table.num_outputs[slots] >= table.max_outputs[slots]
    stops: dict[int, Stop] = {}
    for index in (at_eos | at_limit | table.has_stop_ids[slots]).nonzero()[0].tolist():
        request = table.request(int(slots[index]))
        token_id = int(tokens[index])
        may_stop = table.num_outputs[slots[index]] >= request.sampling.min_tokens
        if may_stop and at_eos[index]:
            stops[int(rows[index])] = Stop(FinishReason.STOP)
        elif may_stop and token_id in request.own_stop_ids:
            stops[int(rows[index])] = Stop(FinishReason.STOP, token_id)
        elif at_limit[index]:
            stops[int(rows[index])] = Stop(FinishReason.LENGTH)
    return stops
