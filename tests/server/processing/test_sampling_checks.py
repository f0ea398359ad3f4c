import math
from typing import Any

import pytest

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_engine.messages import RepetitionDetection, SamplingParams
from tokenmill_server.processing.sampling_checks import (
    check_num_prompt_logprobs,
    check_sampling,
    check_some_token_is_possible,
)

VOCAB_SIZE = 100


def check(max_logprobs: int = 20, **fields: Any) -> None:
    check_sampling(SamplingParams(**fields), VOCAB_SIZE, max_logprobs)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1},
        {"temperature": 2.0, "top_k": 10**6, "min_p": 1.0, "presence_penalty": -2, "frequency_penalty": 2.0},
        {"n": 1024, "seed": -(2**63), "max_tokens": 1, "min_tokens": 1},
        {"seed": 2**63 - 1, "max_tokens": None, "min_tokens": 5},
        {"logit_bias": {0: 100.0, 99: -100.0}, "allowed_token_ids": (0, 99), "stop_token_ids": (99,)},
        {"logprobs": 0, "prompt_logprobs": 20},
        {"n": 3, "temperature": 0.0},
        {"repetition_detection": RepetitionDetection(max_pattern_size=256, min_pattern_size=256)},
        {"stop": ("x" * 1024,), "bad_words": ("x" * 256,) * 32, "spaces_between_special_tokens": True},
    ],
)
def test_accepted(fields: dict[str, Any]) -> None:
    check(**fields)


@pytest.mark.parametrize(
    ("param", "value"),
    [
        *[("temperature", value) for value in (-0.1, 2.1, math.nan, math.inf, True, "1")],
        *[("top_p", value) for value in (0.0, 1.1, math.nan)],
        *[("top_k", value) for value in (-2, 1.5, True)],
        *[("min_p", value) for value in (-0.1, 1.1, math.nan)],
        *[("presence_penalty", value) for value in (-2.1, 2.1, math.nan)],
        *[("frequency_penalty", value) for value in (-2.1, 2.1, math.inf)],
        *[("repetition_penalty", value) for value in (0.0, -1.0, 1e-300, 0.009, 101, math.nan, math.inf)],
        *[("seed", value) for value in (2**63, -(2**63) - 1, 1.5)],
        *[("n", value) for value in (0, -1, 1025, 1.0)],
        *[("max_tokens", value) for value in (0, -1)],
        *[("min_tokens", value) for value in (-1, 17)],
        *[("stop", value) for value in (("",), (1,), ("x" * 1025,))],
        *[("stop_token_ids", value) for value in ((-1,), (100,), (True,), (5,) * 101)],
        *[("logit_bias", value) for value in ({100: 1.0}, {-1: 1.0}, {1: math.nan}, {1: 101.0})],
        *[("allowed_token_ids", value) for value in ((), (100,))],
        *[("bad_words", value) for value in (("",), ("x",) * 129, ("x" * 257,), ("x" * 256,) * 33)],
        ("spaces_between_special_tokens", False),
        *[("logprobs", value) for value in (-1, 21)],
        *[("prompt_logprobs", value) for value in (-1, 21)],
    ],
)
def test_refused_by_name(param: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(**{param: value})
    assert caught.value.param == param
    assert param in str(caught.value)


def test_no_limit_on_logprobs() -> None:
    check(max_logprobs=-1, logprobs=-1, prompt_logprobs=VOCAB_SIZE)
    with pytest.raises(InvalidRequestError):
        check(max_logprobs=-1, logprobs=VOCAB_SIZE + 1)


def test_a_limit_above_the_vocabulary_leaves_the_vocabulary() -> None:
    check(max_logprobs=10 * VOCAB_SIZE, logprobs=VOCAB_SIZE)
    with pytest.raises(InvalidRequestError):
        check(max_logprobs=10 * VOCAB_SIZE, prompt_logprobs=VOCAB_SIZE + 1)


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("allowed_token_ids", {"allowed_token_ids": (2,), "min_tokens": 1}),
        ("allowed_token_ids", {"allowed_token_ids": (2, 7), "stop_token_ids": (7,), "min_tokens": 1}),
        ("allowed_token_ids", {"allowed_token_ids": (2, 8), "bad_words_token_ids": ((8,),), "min_tokens": 1}),
        ("stop_token_ids", {"stop_token_ids": tuple(range(VOCAB_SIZE)), "min_tokens": 1}),
        ("stop_token_ids", {"stop_token_ids": (0, 1, *range(3, VOCAB_SIZE)), "min_tokens": 1}),
        ("bad_words", {"allowed_token_ids": (8,), "bad_words_token_ids": ((8,),)}),
    ],
)
def test_nothing_to_choose_from(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_some_token_is_possible(SamplingParams(**fields), VOCAB_SIZE, (2,))
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"min_tokens": 5},
        {"allowed_token_ids": (2,)},
        {"allowed_token_ids": (2,), "min_tokens": 1, "ignore_eos": True},
        {"allowed_token_ids": (2, 8), "min_tokens": 1, "bad_words_token_ids": ((8, 9),)},
        {"stop_token_ids": tuple(range(VOCAB_SIZE))},
    ],
)
def test_something_to_choose_from(fields: dict[str, Any]) -> None:
    check_some_token_is_possible(SamplingParams(**fields), VOCAB_SIZE, (2,))


def test_prompt_logprobs_of_one_reply() -> None:
    most = SamplingParams(prompt_logprobs=20)
    check_num_prompt_logprobs(131072, most, "prompt_logprobs")
    check_num_prompt_logprobs(10**9, SamplingParams(), "prompt_logprobs")
    for num_tokens, sampling in ((8 * 131072, most), (131072, SamplingParams(prompt_logprobs=20, n=2))):
        with pytest.raises(InvalidRequestError, match="more than the limit of 3000000") as caught:
            check_num_prompt_logprobs(num_tokens, sampling, "prompt_logprobs")
        assert caught.value.param == "prompt_logprobs"


def test_repetition_detection_is_no_dict() -> None:
    with pytest.raises(InvalidRequestError, match="must be a RepetitionDetection, got"):
        check(repetition_detection={"max_pattern_size": 3})
