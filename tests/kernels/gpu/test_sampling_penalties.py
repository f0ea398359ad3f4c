"""The penalty kernel in the interpreter: equal to separate operators, to the bit."""

import pytest
import torch

from tokenmill_kernels import sampling_columns as columns
from tokenmill_kernels.gpu.sampling import SamplingTables
from tokenmill_kernels.gpu.sampling_penalties import allocate_counters, apply_penalties

PENALTIES = [(1.0, 0.0, 0.0), (1.3, 0.0, 0.0), (1.0, 0.7, 0.0), (1.0, 0.0, -0.4), (0.8, -0.3, 1.1), (1.1, 0.2, 0.0)]
"""(repetition, frequency, presence) by slot"""


def make_tables(vocab_size: int, max_len: int) -> SamplingTables:
    floats = torch.full((len(PENALTIES), columns.NUM_FLOATS), float("nan"))
    for column, values in zip(
        (columns.REPETITION, columns.FREQUENCY, columns.PRESENCE), zip(*PENALTIES, strict=True), strict=True
    ):
        floats[:, column] = torch.tensor(values)
    num_tokens = torch.randint(1, max_len + 1, (len(PENALTIES),), dtype=torch.int32)
    num_tokens[1], num_tokens[2] = max_len, 1
    return SamplingTables(
        floats=floats,
        integers=torch.zeros(len(PENALTIES), columns.NUM_INTEGERS, dtype=torch.int64),
        # Ids from a few, so that most tokens occur several times.
        token_ids=torch.randint(0, min(vocab_size, 300), (len(PENALTIES), max_len), dtype=torch.int32),
        num_tokens=num_tokens,
        num_prompt=(num_tokens // 3).clamp(min=1),
    )


def expected(row: torch.Tensor, tables: SamplingTables, slot: int) -> torch.Tensor:
    """`row` after the penalties of `slot`, token by token."""
    repetition, frequency, presence = (
        tables.floats[slot, column] for column in (columns.REPETITION, columns.FREQUENCY, columns.PRESENCE)
    )
    known = tables.token_ids[slot, : tables.num_tokens[slot]].tolist()
    output = known[int(tables.num_prompt[slot]) :]
    row = row.clone()
    for token in set(known):
        value = row[token] / repetition if row[token] > 0 else row[token] * repetition
        count = output.count(token)
        row[token] = value - count * frequency - (presence if count else 0.0)
    return row


@pytest.mark.parametrize("num_workers", [1, 2, 50])
@pytest.mark.parametrize(("vocab_size", "max_len"), [(50, 20), (5003, 1500)])
def test_each_token_is_changed_once(vocab_size: int, max_len: int, num_workers: int) -> None:
    tables = make_tables(vocab_size, max_len)
    slots = torch.tensor([3, -1, 1, 0, 4, 2, 5], dtype=torch.int32)
    logits = torch.randn(len(slots), vocab_size) * 3
    before = logits.clone()
    counters = allocate_counters(num_workers, vocab_size, logits.device)
    apply_penalties(logits, slots, tables, counters)
    for row, slot in enumerate(slots.tolist()):
        assert torch.equal(logits[row], before[row] if slot < 0 else expected(before[row], tables, slot))
    assert not counters.any()


def test_a_second_step_counts_afresh() -> None:
    tables = make_tables(60, 30)
    slots = torch.arange(len(PENALTIES), dtype=torch.int32)
    counters = allocate_counters(2, 60, slots.device)
    for _ in range(2):
        logits = torch.randn(len(slots), 60)
        before = logits.clone()
        apply_penalties(logits, slots, tables, counters)
        for row in range(len(slots)):
            assert torch.equal(logits[row], expected(before[row], tables, row))
        tables.num_tokens.sub_(1).clamp_(min=1)
