"""Made-up steps of the start."""

import os
import subprocess
import sys

import pytest

from tokenmill_engine.sampling.edits import LogitEdits
from tokenmill_engine.sampling.table import EDIT, LOGPROBS, PENALTY, RANDOM, features_of
from tokenmill_engine.worker.rehearsal import (
    GREEDY,
    UNUSUAL,
    RehearsalPlans,
    prefill_sizes,
    prompt_lengths,
    rehearsal_plan,
)


@pytest.mark.parametrize(
    ("budget", "sizes"),
    [
        (100, [100]),
        (256, [256]),
        (300, [256, 300]),
        (2048, [256, 512, 1024, 2048]),
        (16384, [256 << k for k in range(6)]),
    ],
)
def test_sizes_of_prefill_steps(budget: int, sizes: list[int]) -> None:
    assert prefill_sizes(budget) == sizes


@pytest.mark.parametrize(
    ("num_tokens", "max_model_len", "max_num_seqs", "expected"),
    [
        (100, 8192, 256, (1, 100)),
        (256, 8192, 256, (1, 256)),
        (8192, 8192, 256, (32, 256)),
        (8192, 8192, 3, (3, 2730)),
        (8192, 8192, 2, (2, 4096)),
        (8192, 2048, 2, (2, 2048)),
        (2304, 128, 256, (18, 128)),
    ],
)
def test_prompts_of_a_step(num_tokens: int, max_model_len: int, max_num_seqs: int, expected: tuple[int, int]) -> None:
    assert prompt_lengths(num_tokens, max_model_len, max_num_seqs) == expected


def test_rehearsed_requests_keep_to_one_block() -> None:
    plan = rehearsal_plan(3, 40, 2, 16, GREEDY)
    assert plan.num_tokens == 120
    assert plan.num_decodes == 0
    assert [start.block_ids for start in plan.starts] == [([0, 0, 0], [0, 0, 0])] * 3
    assert rehearsal_plan(3, 1, 2, 16, GREEDY).num_decodes == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("max_num_seqs", "max_tokens", "mode", "stage"),
    [
        (100, 2048, "graphs", "whole"),
        (100, 2048, "eager", "whole"),
        (1, 512, "graphs", "whole"),
        (100, 2048, "graphs", "first"),
        (100, 2048, "eager", "first"),
        (100, 2048, "graphs", "last"),
        (100, 2048, "graphs", "shared"),
        (100, 2048, "eager", "shared"),
        (100, 2048, "graphs", "qwen2_5_vl"),
        (100, 512, "eager", "qwen3_vl"),
        (2, 512, "graphs", "llava_onevision"),
        (100, 512, "eager", "llava"),
    ],
)
def test_no_step_launches_a_kernel_that_was_not_rehearsed(
    max_num_seqs: int, max_tokens: int, mode: str, stage: str
) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.launched_variants", str(max_num_seqs), str(max_tokens), mode, stage],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    *missing, num_rehearsed = result.stdout.splitlines()
    assert missing == []
    assert int(num_rehearsed) > 20


def test_plans_keep_to_the_limits() -> None:
    plans = RehearsalPlans(max_num_seqs=3, max_num_batched_tokens=7, max_model_len=5, num_groups=1, block_size=16)
    assert [plan.num_tokens for plan in plans.prefills()] == [5]
    assert (plans.largest().num_reqs, plans.largest().num_tokens) == (3, 6)
    assert [plan.num_tokens for plan in plans.unusual()] == [5, 5]


def test_unusual_steps_take_every_way_through_the_sampler_without_a_graph() -> None:
    edits = [LogitEdits.of(sampling, (0,)) for sampling in UNUSUAL]
    features = [features_of(sampling, edit) for sampling, edit in zip(UNUSUAL, edits, strict=True)]
    assert features == [PENALTY | EDIT | LOGPROBS, RANDOM | LOGPROBS]
    assert edits[0] is not None
    assert edits[0].allowed is not None
    assert all(len(ids) > 0 for ids in (edits[0].bias_ids, edits[0].end_ids, edits[0].bad_ids, edits[0].prefix))
    assert UNUSUAL[0].prompt_logprobs is not None
