"""The embedded model through `LLM` on a CUDA device, against transformers in float32 on the same device.

Greedy text is fragile in bfloat16, so each token that was generated is compared with what the reference would choose
after the same tokens. The model is the file that TOKENMILL_TEST_GGUF names, or the one that the package brings.
"""

import logging
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from tests.support.fidelity import Comparison, compare_generated, compare_given, compare_scores
from tests.support.offline import Run, run_offline
from tests.support.smollm2 import Reference, Scores, chat_cases, mixed_cases
from tokenmill import SamplingParams
from tokenmill_engine.config.model_files import resolve_model

pytestmark = pytest.mark.gpu

logger = logging.getLogger(__name__)

CASES = chat_cases() + mixed_cases()
NUM_TOKENS = 48
FLAGS: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "max_model_len": 1024}
ROOMY = FLAGS | {"kv_cache_memory_bytes": "2G"}
VARIANTS: dict[str, dict[str, Any]] = {
    "graphs": ROOMY,
    "eager": ROOMY | {"enforce_eager": True},
    "chunked": ROOMY | {"max_num_batched_tokens": 64},
    "preempted": FLAGS | {"max_model_len": 640, "num_gpu_blocks_override": 40, "block_size": 16},
    "float32": ROOMY | {"dtype": "float32"},
}

CLEAR = 0.1
"""Logits of about 20 are 0.125 apart in bfloat16, so choices by less are open."""
AGREEMENT = {"bfloat16": 0.97, "float32": 0.998}
"""Least share of positions with the same most likely token, clear or not. In bfloat16 transformers has about 0.975."""
MEAN_DIFFERENCE = {"bfloat16": 0.05, "float32": 0.001}
MAX_DIFFERENCE = {"bfloat16": 1.0, "float32": 0.02}
"""Of log-probabilities from the reference's."""


@pytest.fixture(scope="module")
def model() -> str:
    return os.environ.get("TOKENMILL_TEST_GGUF") or resolve_model(None).path


@pytest.fixture(scope="module")
def score(model: str) -> Callable[[list[int]], Scores]:
    """Scores by the reference; those of a sequence that came before are remembered."""
    reference = Reference(model, "cuda")
    remembered = cache(lambda token_ids: reference.score(token_ids))
    return lambda token_ids: remembered(tuple(token_ids))


@pytest.fixture(scope="module")
def run(model: str) -> Callable[[str], Run]:
    """By variant, which runs once: outputs of every case, greedily; then of every reference text, to be scored."""
    generate = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=0)
    rate = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    prompts = [case.prompt_ids for case in CASES] + [case.all_ids for case in CASES]
    sampling = [generate] * len(CASES) + [rate] * len(CASES)
    return cache(lambda variant: run_offline(prompts, sampling, model=model, **VARIANTS[variant]))


def check(title: str, comparison: Comparison, dtype: str) -> None:
    """At least 99 % agree on the most likely token where the reference's choice is clear; probabilities are near."""
    text = f"{title}: {comparison.describe(CLEAR)}"
    logger.info("%s", text)
    assert comparison.agreement(CLEAR) >= 0.99, text
    assert comparison.agreement() >= AGREEMENT[dtype], text
    assert comparison.differences.mean() < MEAN_DIFFERENCE[dtype], text
    assert comparison.differences.max() < MAX_DIFFERENCE[dtype], text


@pytest.mark.parametrize("variant", VARIANTS)
def test_generated_tokens_are_the_references_choice(
    variant: str, run: Callable[[str], Run], score: Callable[[list[int]], Scores]
) -> None:
    result = run(variant)
    outputs = result.outputs[: len(CASES)]
    check(f"generated, {variant}", compare_generated(CASES, outputs, score), VARIANTS[variant]["dtype"])
    assert (result.num_preemptions > 3) == (variant == "preempted")


@pytest.mark.parametrize("variant", VARIANTS)
def test_log_probabilities_of_given_texts(
    variant: str, run: Callable[[str], Run], score: Callable[[list[int]], Scores]
) -> None:
    """Of every token of prompts and reference answers, given those before it."""
    outputs = run(variant).outputs[len(CASES) :]
    check(f"given, {variant}", compare_given(CASES, outputs, score), VARIANTS[variant]["dtype"])


def test_bfloat16_is_as_near_as_that_of_transformers(
    model: str, run: Callable[[str], Run], score: Callable[[list[int]], Scores]
) -> None:
    """At all positions of the given texts, near ties too."""
    ours = compare_given(CASES, run("graphs").outputs[len(CASES) :], score)
    rounded = Reference(model, "cuda", torch.bfloat16)
    theirs = compare_scores([rounded.score(case.all_ids) for case in CASES], [score(case.all_ids) for case in CASES])
    text = f"transformers in bfloat16: {theirs.describe(CLEAR)}"
    logger.info("%s", text)
    assert ours.agreement() > theirs.agreement() - 0.005, text
    assert ours.differences.mean() < 1.25 * theirs.differences.mean(), text


@pytest.mark.parametrize("variant", ["eager", "chunked", "preempted"])
def test_texts_part_only_where_the_reference_has_a_near_tie(
    variant: str, run: Callable[[str], Run], score: Callable[[list[int]], Scores]
) -> None:
    """From those with graphs; and up to there their log-probabilities are close."""
    differences: list[float] = []
    for case, ours, others in zip(CASES, run("graphs").outputs, run(variant).outputs, strict=False):
        ids, rows, other_rows = ours.outputs[0].token_ids, ours.outputs[0].logprobs, others.outputs[0].logprobs
        assert rows is not None
        assert other_rows is not None
        for index, (first, second) in enumerate(zip(ids, others.outputs[0].token_ids, strict=False)):
            if first != second:
                margin = score(case.prompt_ids + ids).margins[len(case.prompt_ids) - 1 + index]
                assert margin < 6 * CLEAR, f"{case.name}, generated token {index}"
                break
            differences.append(abs(rows[index][first].logprob - other_rows[index][first].logprob))
    logger.info("graphs and %s: %d positions in common", variant, len(differences))
    assert len(differences) > len(CASES) * NUM_TOKENS / 3
    assert sum(differences) / len(differences) < MEAN_DIFFERENCE["bfloat16"]
    assert max(differences) < MAX_DIFFERENCE["bfloat16"]
