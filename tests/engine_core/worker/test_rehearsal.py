"""Made-up steps of the start."""

import pytest

from tokenmill_engine.worker.rehearsal import GREEDY, prefill_sizes, prompt_lengths, rehearsal_plan


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
        (256, 8192, 256, (1, 256)),
        (8192, 8192, 256, (4, 2048)),
        (8192, 8192, 2, (2, 2048)),
        (2304, 512, 256, (4, 512)),
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
