"""Packs the outcome of a step into one message per API server: array operations, whatever the number of requests."""

from collections.abc import Mapping
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.ipc.ids import CLIENT_SHIFT
from tokenmill_engine.messages import EngineLoad, Finish, PooledVector, StepOutput, TokenLogprobs
from tokenmill_engine.outputs import NO_TOKEN_LEFT, LogprobRows
from tokenmill_engine.request import Request
from tokenmill_engine.scheduler.outcome import StepOutcome
from tokenmill_engine.scheduler.stopping import Stop

T = TypeVar("T")


def pack_outcome(
    outcome: StepOutcome, engine: int, load: EngineLoad, num_received: Mapping[int, int] | None = None
) -> dict[int, StepOutput]:
    """The outcome by API server, each with its entry of `num_received` in its load. Servers without an entry in the
    outcome get no message."""
    if len(outcome.request_ids) == 0:
        return {}

    def load_for(client: int) -> EngineLoad:
        if num_received is None:
            return load
        return msgspec.structs.replace(load, num_received=num_received.get(client))

    clients = outcome.request_ids >> CLIENT_SHIFT
    if (clients == clients[0]).all():
        entries = np.arange(len(clients))
        client = int(clients[0])
        return {client: _pack_entries(outcome, entries, outcome.token_ids, engine, load_for(client))}
    row_of_token = np.repeat(np.arange(len(clients)), outcome.num_tokens)
    messages = {}
    for client in np.unique(clients).tolist():
        token_ids = outcome.token_ids[clients[row_of_token] == client]
        entries = np.flatnonzero(clients == client)
        messages[client] = _pack_entries(outcome, entries, token_ids, engine, load_for(client))
    return messages


def _pack_entries(
    outcome: StepOutcome, entries: NDArray[np.intp], token_ids: NDArray[np.int32], engine: int, load: EngineLoad
) -> StepOutput:
    """One message of `entries` (ascending), whose tokens are `token_ids`."""
    return StepOutput(
        engine=engine,
        request_ids=outcome.request_ids[entries].tobytes(),
        num_tokens=outcome.num_tokens[entries].tobytes(),
        token_ids=token_ids.tobytes(),
        load=load,
        finishes=[
            Finish(index, stop.reason, stop.token_id, stop.message, request.num_preemptions, _blamed(request, stop))
            for index, (request, stop) in _select(entries, outcome.finished)
        ],
        logprobs=[_pack_logprobs(index, rows) for index, rows in _select(entries, outcome.logprobs)],
        prompt_logprobs=[_pack_logprobs(index, rows) for index, rows in _select(entries, outcome.prompt_logprobs)],
        cached_tokens=[(index, r.num_cached_tokens) for index, r in _select(entries, outcome.prefilled)],
        prefill_times=[
            (index, r.first_token_time - r.first_scheduled_time) for index, r in _select(entries, outcome.prefilled)
        ],
        vectors=[
            PooledVector(index, vector.astype("<f4").tobytes()) for index, vector in _select(entries, outcome.vectors)
        ],
    )


def _blamed(request: Request, stop: Stop) -> str | None:
    """The field that excluded all that a grammar allowed. The others are known to leave something by themselves."""
    sampling = request.sampling
    if stop.message != NO_TOKEN_LEFT or sampling.structured is None:
        return None
    if sampling.allowed_token_ids is not None:
        return "allowed_token_ids"
    return "bad_words" if sampling.bad_words_token_ids else None


def _select(entries: NDArray[np.intp], by_entry: dict[int, T]) -> list[tuple[int, T]]:
    """What belongs to `entries`, by index into them."""
    if not by_entry:
        return []
    return [(index, by_entry[entry]) for index, entry in enumerate(entries.tolist()) if entry in by_entry]


def _pack_logprobs(index: int, rows: LogprobRows) -> TokenLogprobs:
    return TokenLogprobs(
        index=index,
        num_top=rows.token_ids.shape[1] - 1,
        token_ids=rows.token_ids.astype("<i4").tobytes(),
        logprobs=rows.logprobs.astype("<f4").tobytes(),
        ranks=rows.ranks.astype("<i4").tobytes(),
    )
