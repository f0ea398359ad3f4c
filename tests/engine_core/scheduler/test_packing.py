"""One message per API server: right tokens to the right requests, whatever the order of rows."""

import numpy as np

from tests.support.scheduling import make_request
from tokenmill_engine.messages import EngineLoad, FinishReason, StepOutput
from tokenmill_engine.outputs import LogprobRows
from tokenmill_engine.scheduler.outcome import StepOutcome
from tokenmill_engine.scheduler.packing import pack_outcome
from tokenmill_engine.scheduler.stopping import Stop

LOAD = EngineLoad(3, 2, 0.5)


def request_id(client: int, number: int) -> int:
    return client << 48 | number


def unpack(message: StepOutput) -> dict[int, list[int]]:
    request_ids = np.frombuffer(message.request_ids, "<i8").tolist()
    counts = np.frombuffer(message.num_tokens, "<i4").tolist()
    tokens = np.frombuffer(message.token_ids, "<i4").tolist()
    result = {}
    for one, count in zip(request_ids, counts, strict=True):
        result[one], tokens = tokens[:count], tokens[count:]
    assert tokens == []
    return result


def outcome(request_ids: list[int], num_tokens: list[int], token_ids: list[int], **more: object) -> StepOutcome:
    arrays = (np.array(request_ids, np.int64), np.array(num_tokens, np.int32), np.array(token_ids, np.int32))
    return StepOutcome(*arrays, **more)  # type: ignore[arg-type]


def test_nothing_to_tell_is_no_message() -> None:
    assert pack_outcome(outcome([], [], []), 0, LOAD) == {}


def test_one_client_gets_everything_in_order() -> None:
    ids = [request_id(4, number) for number in (9, 7, 8)]
    messages = pack_outcome(outcome(ids, [1, 0, 2], [11, 12, 13]), 5, LOAD)
    assert list(messages) == [4]
    assert unpack(messages[4]) == {ids[0]: [11], ids[1]: [], ids[2]: [12, 13]}
    assert (messages[4].engine, messages[4].load) == (5, LOAD)


def test_each_client_is_told_how_many_of_its_requests_the_load_counts() -> None:
    ids = [request_id(client, 1) for client in (0, 1, 2)]
    messages = pack_outcome(outcome(ids, [1, 1, 1], [11, 12, 13]), 0, LOAD, {0: 8, 2: 9})
    assert [messages[client].load for client in range(3)] == [
        EngineLoad(3, 2, 0.5, 0, num_received) for num_received in (8, None, 9)
    ]


def test_clients_get_their_own_requests_with_indexes_of_their_own() -> None:
    ids = [request_id(client, number) for client, number in ((1, 1), (0, 2), (1, 3), (2, 4))]
    rows = LogprobRows(np.array([[5, 6]], np.int32), np.array([[-1.0, -2.0]], np.float32), np.array([1], np.int32))
    request = make_request(ids[2])
    request.num_cached_tokens = 16
    request.num_preemptions = 3
    request.first_scheduled_time, request.first_token_time = 7.0, 7.5
    messages = pack_outcome(
        outcome(
            ids,
            [2, 1, 3, 0],
            [21, 22, 31, 41, 42, 43],
            finished={2: (request, Stop(FinishReason.STOP, 43)), 3: (request, Stop(FinishReason.ERROR, None, "why"))},
            logprobs={0: rows},
            prompt_logprobs={3: rows},
            prefilled={2: request},
        ),
        0,
        LOAD,
    )
    assert [unpack(messages[client]) for client in range(3)] == [
        {ids[1]: [31]},
        {ids[0]: [21, 22], ids[2]: [41, 42, 43]},
        {ids[3]: []},
    ]
    finish = messages[1].finishes[0]
    assert (finish.index, finish.reason, finish.stop_token_id) == (1, FinishReason.STOP, 43)
    assert messages[1].cached_tokens == [(1, 16)]
    assert messages[1].prefill_times == [(1, 0.5)]
    assert (finish.num_preemptions, messages[2].finishes[0].num_preemptions) == (3, 3)
    assert messages[1].logprobs[0].index == 0
    assert messages[1].logprobs[0].num_top == 1
    assert np.frombuffer(messages[1].logprobs[0].logprobs, "<f4").tolist() == [-1.0, -2.0]
    assert (messages[2].finishes[0].index, messages[2].finishes[0].message) == (0, "why")
    assert np.frombuffer(messages[2].prompt_logprobs[0].token_ids, "<i4").tolist() == [5, 6]
    assert messages[0].finishes == []
