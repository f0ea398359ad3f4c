"""The embedded model through `LLM` on the CPU, against transformers in float32.

Equal token ids in float32 however the work is cut; close log-probabilities in bfloat16, whose greedy text is fragile.
"""

import json
from typing import Any

import pytest
import torch

from tests.support.fidelity import compare_given
from tests.support.offline import Run, run_offline
from tests.support.smollm2 import (
    CHAT_FILE,
    EOS_TOKEN_ID,
    Case,
    Reference,
    Scores,
    chat_cases,
    chosen_cases,
    mixed_cases,
)
from tokenmill import LLM, SamplingParams
from tokenmill_engine.config.model_files import resolve_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CHATS = chat_cases()
CASES = CHATS + mixed_cases()
SOME = CHATS + chosen_cases()
"""What each way of cutting the work is tried with. All are answered in the way that is the default."""
BLOCK_SIZE = 16
FLAGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 1024}
ROOMY = FLAGS | {"block_size": BLOCK_SIZE, "kv_cache_memory_bytes": "1G"}
"""All requests fit at once."""
CROWDED = FLAGS | {"max_model_len": 640, "block_size": 2, "num_gpu_blocks_override": 320}
"""The longest request fits, with little beside it; a block lasts for two tokens only."""
MIN_MARGIN = 0.01
"""A greedy choice by less could go the other way with another order of additions."""

SAMPLED = CASES[3::5]
STYLES: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.2, "top_k": 40, "min_p": 0.02},
    {"temperature": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
)
SEEDED = [
    SamplingParams(seed=1000 + index, max_tokens=12, ignore_eos=True, **STYLES[index % len(STYLES)])
    for index in range(len(SAMPLED))
]


def greedy(case: Case, max_tokens: int | None = None) -> SamplingParams:
    """As many tokens as the reference; where that ends with the end token, there is room to go on after it."""
    room = 8 if case.greedy_ids[-1] == EOS_TOKEN_ID else 0
    return SamplingParams(temperature=0, max_tokens=max_tokens or len(case.greedy_ids) + room)


def prompts_of(cases: list[Case]) -> list[list[int]]:
    """Theirs, and those of the sampled ones."""
    return [case.prompt_ids for case in (*cases, *SAMPLED)]


def check_greedy(run: Run, cases: list[Case]) -> None:
    """All greedy ids of `cases` are those of the reference, and as many as were asked for."""
    wrong = {}
    for case, ids, output in zip(cases, run.token_ids, run.outputs, strict=False):
        expected = case.greedy_ids[: len(ids)] if output.outputs[0].finish_reason == "length" else case.greedy_ids
        if ids != expected:
            wrong[case.name] = (ids, expected)
    assert not wrong


def run_all(**flags: Any) -> Run:
    """Some cases greedily and, at the same time, the sampled ones with their seeds."""
    return run_offline(prompts_of(SOME), [*map(greedy, SOME), *SEEDED], **flags)


@pytest.fixture(scope="module")
def scores() -> dict[str, Scores]:
    """By name, of prompt and greedy continuation, by transformers."""
    reference = Reference(resolve_model(None).path)
    return {case.name: reference.score(case.all_ids) for case in SOME}


@pytest.fixture(scope="module")
def alone() -> Run:
    """One request at a time, nothing kept from one to the next. Chats are answered to the end, the others begun."""
    sampling = [greedy(case, None if case in CHATS else 6) for case in SOME]
    return run_offline(prompts_of(SOME), [*sampling, *SEEDED], **ROOMY, max_num_seqs=1, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def sampled_alone(alone: Run) -> list[list[int]]:
    return alone.token_ids[len(SOME) :]


def test_the_stored_ids_are_what_transformers_chooses(scores: dict[str, Scores]) -> None:
    """Each is the clear maximum after those before it, so greedy decoding can only take this way."""
    assert len(CASES) == 103
    assert {1, 16, 17, 32, 600} <= {len(case.prompt_ids) for case in SOME}
    for case in SOME:
        first = len(case.prompt_ids) - 1
        assert scores[case.name].best[first:].tolist() == case.greedy_ids, case.name
        assert scores[case.name].margins[first:].min() > MIN_MARGIN, case.name


def test_the_reference_weights_are_those_of_transformers_own_loader(scores: dict[str, Scores]) -> None:
    for row in json.loads(CHAT_FILE.read_text()):
        logprobs = scores[row["prompt"]].logprobs[len(row["prompt_ids"]) - 1 :]
        torch.testing.assert_close(logprobs, torch.tensor(row["fp32_logprob"]), atol=1e-3, rtol=0)


def test_alone(alone: Run, sampled_alone: list[list[int]]) -> None:
    check_greedy(alone, SOME)
    continuations = [case.greedy_ids[:12] for case in SAMPLED]
    assert sum(ids != greedy_ids for ids, greedy_ids in zip(sampled_alone, continuations, strict=True)) > 15


def test_all_at_once_then_again_with_prefix_hits(sampled_alone: list[list[int]]) -> None:
    """Asynchronous scheduling and prefix caching: the defaults."""
    prompts = prompts_of(CASES)
    with LLM(**ROOMY) as llm:
        for repeated in (False, True):
            outputs = llm.generate(prompts, [*map(greedy, CASES), *SEEDED], use_tqdm=False)
            run = Run(outputs, log="")
            check_greedy(run, CASES)
            assert run.token_ids[len(CASES) :] == sampled_alone
            if repeated:
                known = [(len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in prompts]
                assert [output.num_cached_tokens for output in outputs] == known
                assert sum(known) > 5000


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({"async_scheduling": False, "enable_prefix_caching": False}, id="whole-prompts"),
        pytest.param({"async_scheduling": False, "max_num_batched_tokens": 32}, id="chunks-of-32"),
    ],
)
def test_synchronous_scheduling(flags: dict[str, Any], sampled_alone: list[list[int]]) -> None:
    run = run_all(**ROOMY, **flags)
    check_greedy(run, SOME)
    assert run.token_ids[len(SOME) :] == sampled_alone
    assert run.num_preemptions == 0


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({"enable_prefix_caching": False}, id="asynchronous"),
        pytest.param({"async_scheduling": False, "max_num_batched_tokens": 64}, id="synchronous-caching-chunked"),
    ],
)
def test_preempted(flags: dict[str, Any], sampled_alone: list[list[int]]) -> None:
    run = run_all(**CROWDED, **flags)
    check_greedy(run, SOME)
    assert run.token_ids[len(SOME) :] == sampled_alone
    assert run.num_preemptions > 5


@pytest.mark.parametrize(
    ("dtype", "agreement", "mean_difference", "max_difference"),
    [("float32", 0.999, 1e-4, 0.002), ("bfloat16", 0.98, 0.03, 0.6)],
)
def test_log_probabilities_of_given_texts(
    scores: dict[str, Scores], dtype: str, agreement: float, mean_difference: float, max_difference: float
) -> None:
    """Of every token of prompts and reference answers, given those before it."""
    cases = SOME if dtype == "bfloat16" else SOME[::2]
    sampling = [SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)] * len(cases)
    run = run_offline([case.all_ids for case in cases], sampling, **ROOMY | {"dtype": dtype})
    by_ids = {tuple(case.all_ids): scores[case.name] for case in cases}
    comparison = compare_given(cases, run.outputs, lambda token_ids: by_ids[tuple(token_ids)])
    text = comparison.describe(min_margin=0.1)
    assert comparison.agreement() >= agreement, text
    assert comparison.differences.mean() < mean_difference, text
    assert comparison.differences.max() < max_difference, text
