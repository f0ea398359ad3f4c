"""Request states, and what a message must satisfy to become a request."""

import math
import random

import numpy as np
import pytest

from tests.support.media_items import IMAGE_TOKEN, QWEN, VIDEO_TOKEN, WITH_TIME, qwen_item, video_item
from tests.support.scheduling import make_request
from tokenmill_engine.block_hash import hash_full_blocks
from tokenmill_engine.errors import ContextLengthError, InvalidRequestError
from tokenmill_engine.messages import AddRequest, FinishReason, SamplingParams
from tokenmill_engine.request import (
    IllegalTransitionError,
    Request,
    RequestLimits,
    RequestState,
    build_request,
)

LIMITS = RequestLimits(max_model_len=20, vocab_size=100, eos_token_ids=(2, 3))
ALLOWED = {
    (RequestState.WAITING, RequestState.RUNNING),
    (RequestState.WAITING, RequestState.FINISHED),
    (RequestState.RUNNING, RequestState.PREEMPTED),
    (RequestState.RUNNING, RequestState.FINISHED),
    (RequestState.PREEMPTED, RequestState.RUNNING),
    (RequestState.PREEMPTED, RequestState.FINISHED),
}
WAYS = {
    RequestState.WAITING: [],
    RequestState.RUNNING: [RequestState.RUNNING],
    RequestState.PREEMPTED: [RequestState.RUNNING, RequestState.PREEMPTED],
    RequestState.FINISHED: [RequestState.FINISHED],
}


def in_state(state: RequestState) -> Request:
    request = make_request(1)
    for step in WAYS[state]:
        request.transition(step, FinishReason.STOP if step is RequestState.FINISHED else None)
    return request


def build(prompt: list[int], sampling: SamplingParams | None = None, seed: int = 0) -> Request:
    packed = np.array(prompt, dtype="<i4").tobytes()
    message = AddRequest((5 << 48) | 1, "label", packed, sampling or SamplingParams(), 1.5, 3, "salt")
    return build_request(message, LIMITS, random.Random(seed))


@pytest.mark.parametrize("before", RequestState)
@pytest.mark.parametrize("after", RequestState)
def test_only_the_tables_transitions_are_possible(before: RequestState, after: RequestState) -> None:
    request = in_state(before)
    reason = FinishReason.LENGTH if after is RequestState.FINISHED else None
    if (before, after) in ALLOWED:
        request.transition(after, reason)
        assert request.state is after
        assert request.finish_reason is reason
    else:
        with pytest.raises(IllegalTransitionError, match=before.name):
            request.transition(after, reason)
        assert request.state is before


def test_a_reason_goes_with_the_end_and_with_nothing_else() -> None:
    with pytest.raises(IllegalTransitionError):
        in_state(RequestState.RUNNING).transition(RequestState.FINISHED)
    with pytest.raises(IllegalTransitionError):
        in_state(RequestState.WAITING).transition(RequestState.RUNNING, FinishReason.STOP)


def test_the_message_is_resolved() -> None:
    request = build([1, 2, 3], SamplingParams(max_tokens=None, stop_token_ids=(3, 50)))
    assert request.prompt_token_ids.tolist() == [1, 2, 3]
    assert (request.client, request.priority, request.arrival_time) == (5, 3, 1.5)
    assert request.cache_key.cache_salt == "salt"
    assert request.sampling.max_tokens == request.max_tokens == 17
    assert request.stop_token_ids == (2, 3, 50)


def test_max_tokens_is_cut_to_the_room_there_is() -> None:
    assert build([1] * 15, SamplingParams(max_tokens=100)).max_tokens == 5
    assert build([1] * 15, SamplingParams(max_tokens=4)).max_tokens == 4


def test_ignoring_the_end_leaves_the_requests_own_stop_tokens() -> None:
    assert build([1], SamplingParams(ignore_eos=True, stop_token_ids=(7,))).stop_token_ids == (7,)


def test_stop_tokens_are_looked_up_not_searched() -> None:
    request = build([1], SamplingParams(stop_token_ids=(50, 3, 50)))
    assert request.own_stop_ids == frozenset({3, 50})
    assert request.sampling.stop_token_ids == (50, 3)
    assert request.stop_token_ids == (2, 3, 50)


def test_bad_words_that_no_output_can_hold_are_left_out() -> None:
    endless = tuple([5] * 200_000)
    request = build(
        [1], SamplingParams(max_tokens=3, bad_words_token_ids=((4,), (), (4, 5, 6), (1,) * 4, endless, (4,)))
    )
    assert request.sampling.bad_words_token_ids == ((4,), (4, 5, 6))


def test_seeds_are_kept_or_drawn_from_the_engines_stream() -> None:
    assert build([1], SamplingParams(seed=-4)).sampling.seed == -4
    seeds = random.Random(9)
    message = AddRequest(1, "", np.array([1], dtype="<i4").tobytes(), SamplingParams(), 0.0)
    drawn = [build_request(message, LIMITS, seeds).sampling.seed for _ in range(3)]
    assert len(set(drawn)) == 3
    assert build([1], seed=9).sampling.seed == drawn[0]


def test_a_prompt_needs_room_for_one_token_unless_none_is_asked_for() -> None:
    assert build([1] * 19).max_tokens == 1
    with pytest.raises(ContextLengthError, match="20 tokens; this engine holds 20"):
        build([1] * 20)
    assert build([1] * 20, SamplingParams(max_tokens=0)).max_tokens == 0
    with pytest.raises(ContextLengthError):
        build([1] * 21, SamplingParams(max_tokens=0))


@pytest.mark.parametrize(
    ("prompt", "sampling", "param"),
    [
        ([], {}, "prompt"),
        ([100], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1], {"stop_token_ids": (100,)}, "stop_token_ids"),
        ([1], {"allowed_token_ids": (-3,)}, "allowed_token_ids"),
        ([1], {"logit_bias": {99999999: 5.0}}, "logit_bias"),
        ([1], {"logit_bias": {5: math.inf}}, "logit_bias"),
        ([1], {"bad_words_token_ids": ((4,), (5, 100))}, "bad_words"),
        ([1], {"temperature": math.nan}, "temperature"),
        ([1], {"top_p": math.inf}, "top_p"),
        ([1], {"repetition_penalty": -math.inf}, "repetition_penalty"),
        ([1], {"max_tokens": -1}, "max_tokens"),
        ([1], {"logprobs": -1}, "logprobs"),
        ([1], {"logprobs": 101}, "logprobs"),
        ([1], {"prompt_logprobs": 101}, "prompt_logprobs"),
        ([1], {"stop_token_ids": (5,) * 101}, "stop_token_ids"),
        ([1], {"allowed_token_ids": (5,) * 101}, "allowed_token_ids"),
        ([1], {"bad_words_token_ids": tuple((a, b) for a in range(50) for b in range(50))}, "bad_words"),
    ],
)
def test_what_would_fail_on_the_device_is_refused(prompt: list[int], sampling: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        build(prompt, SamplingParams(**sampling))  # type: ignore[arg-type]
    assert caught.value.param == param


def test_a_request_holds_its_images_and_blocks_are_named_by_them() -> None:
    limits = RequestLimits(20, 100, (2, 3), media=QWEN, max_item_tokens=4, num_positions=20)
    prompt = np.array([1, *[IMAGE_TOKEN] * 4, *range(7)], dtype="<i4")

    def named(content: str) -> list[bytes]:
        items = (qwen_item(content, 1),)
        message = AddRequest(1, "", prompt.tobytes(), SamplingParams(), 0.0, media=items)
        request = build_request(message, limits, random.Random(0))
        assert request.media == items
        assert request.media_end == 5
        return list(hash_full_blocks(request.prompt_token_ids, 4, request.cache_key))

    assert named("cat") == named("cat")
    assert not set(named("cat")) & set(named("dog"))


def test_an_output_ends_where_positions_do() -> None:
    """Of a video of 4 tokens and 11 positions, in a prompt of 5 tokens."""
    prompt = np.array([*[VIDEO_TOKEN] * 4, 7], dtype="<i4")

    def most(num_positions: int, **sampling: int) -> int:
        limits = RequestLimits(20, 100, (), media=WITH_TIME, max_item_tokens=4, num_positions=num_positions)
        items = (video_item("a", 0, seconds=5.0),)
        message = AddRequest(1, "", prompt.tobytes(), SamplingParams(**sampling), 0.0, media=items)  # type: ignore[arg-type]
        return build_request(message, limits, random.Random(0)).max_tokens

    assert most(40) == 15
    assert most(20) == 8
    assert most(20, max_tokens=3) == 3
    assert most(12, max_tokens=0) == 0
    with pytest.raises(ContextLengthError, match="videos last longer than the 12 positions"):
        most(12)


def test_images_for_a_model_that_reads_text_are_refused() -> None:
    message = AddRequest(
        1, "", np.full(4, IMAGE_TOKEN, "<i4").tobytes(), SamplingParams(), 0.0, media=(qwen_item("cat", 0),)
    )
    with pytest.raises(InvalidRequestError, match="text only"):
        build_request(message, LIMITS, random.Random(0))
