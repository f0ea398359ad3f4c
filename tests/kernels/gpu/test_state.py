"""Kernels over device-resident request state, in the interpreter."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tokenmill_kernels.gpu.exchange import Report
from tokenmill_kernels.gpu.state import (
    GroupBlocks,
    RequestTables,
    StepRows,
    StepTokens,
    advance,
    expand,
)

NUM_SLOTS, MAX_LEN, BLOCK_SIZE = 9, 2048, 16


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_tables(num_computed: dict[int, int]) -> RequestTables:
    """Random tokens; slots that are not named hold nonsense counts."""
    tables = RequestTables(
        token_ids=torch.randint(0, 50_000, (NUM_SLOTS, MAX_LEN), dtype=torch.int32),
        num_tokens=torch.full((NUM_SLOTS,), 1500, dtype=torch.int32),
        num_computed=torch.full((NUM_SLOTS,), 1 << 30, dtype=torch.int32),
    )
    for slot, count in num_computed.items():
        tables.num_computed[slot] = count
    return tables


def make_rows(slots: list[int], counts: list[int], max_query_len: int | None = None) -> StepRows:
    starts = np.concatenate(([0], np.cumsum(counts)))
    return StepRows(int32(*slots), int32(*starts.tolist()), max_query_len or max(counts))


CASES = {
    "decodes": ([4, 0, 7], [1, 1, 1], {4: 30, 0: 0, 7: 2047}, 0),
    "mixed": ([2, 8, 1, 0], [1, 1, 600, 37], {2: 5, 8: 16, 1: 7, 0: 1600}, 0),
    "one long chunk": ([3], [1300], {3: 111}, 0),
    "padded": ([5, 6, -1, -1], [1, 1, 0, 0], {5: 9, 6: 100}, 2),
    "padded tokens only": ([5, 1], [700, 20], {5: 9, 1: 0}, 1111),
}


@pytest.mark.parametrize(("slots", "counts", "computed", "padding"), CASES.values(), ids=CASES.keys())
def test_expand(slots: list[int], counts: list[int], computed: dict[int, int], padding: int) -> None:
    tables, rows = make_tables(computed), make_rows(slots, counts)
    table = torch.randint(0, 1 << 20, (NUM_SLOTS, MAX_LEN // BLOCK_SIZE), dtype=torch.int32)
    num_tokens = sum(counts) + padding
    out = StepTokens(*(torch.full((size,), -7, dtype=torch.int32) for size in (num_tokens, num_tokens, len(slots))))
    blocks, slot_mapping = torch.full((len(slots), table.shape[1]), -7, dtype=torch.int32), torch.full((num_tokens,), 9)
    expand(tables, rows, BLOCK_SIZE, out, [GroupBlocks(table, blocks, slot_mapping)])

    start = 0
    for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
        if count == 0:
            assert out.seq_lens[row] == 0
            continue
        positions = torch.arange(computed[slot], computed[slot] + count, dtype=torch.int32)
        mine = slice(start, start + count)
        assert torch.equal(out.positions[mine], positions)
        assert torch.equal(out.input_ids[mine], tables.token_ids[slot, positions])
        assert out.seq_lens[row] == computed[slot] + count
        used = -(-int(out.seq_lens[row]) // BLOCK_SIZE)
        assert torch.equal(blocks[row, :used], table[slot, :used])
        assert (blocks[row, used:] == -7).all()
        expected = table[slot, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        assert torch.equal(slot_mapping[mine], expected)
        start += count
    assert not out.input_ids[start:].any()
    assert not out.positions[start:].any()
    assert (slot_mapping[start:] == -1).all()


def test_expand_of_several_groups() -> None:
    tables, rows = make_tables({4: 30, 0: 0}), make_rows([4, 0], [2, 17])
    table = torch.randint(0, 1 << 20, (2, NUM_SLOTS, MAX_LEN // BLOCK_SIZE), dtype=torch.int32)
    out = StepTokens(*(torch.full((size,), -7, dtype=torch.int32) for size in (21, 21, 2)))
    groups = [GroupBlocks(each, torch.full_like(each[:2], -7), torch.full((21,), 9)) for each in table]
    expand(tables, rows, BLOCK_SIZE, out, groups)
    positions = torch.tensor([30, 31, *range(17)])
    assert out.positions.tolist() == [*positions.tolist(), 0, 0]
    for each, group in zip(table, groups, strict=True):
        assert torch.equal(group.step_table[0, :2], each[4, :2])
        assert torch.equal(group.step_table[1, :2], each[0, :2])
        owners = torch.tensor([4] * 2 + [0] * 17)
        expected = each[owners, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        assert group.slots.tolist() == [*expected.tolist(), -1, -1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_advance(dtype: torch.dtype) -> None:
    tables = make_tables({4: 30, 0: 0, 7: 200})
    rows = make_rows([4, 0, 7, -1], [1, 20, 3, 0])
    tables.num_tokens[torch.tensor([4, 7])] = torch.tensor([31, MAX_LEN], dtype=torch.int32)
    before = RequestTables(tables.token_ids.clone(), tables.num_tokens.clone(), tables.num_computed.clone())
    advance(tables, rows, int32(4, -1, 7), torch.tensor([17, 99, -1], dtype=dtype))

    before.num_computed[torch.tensor([4, 0, 7])] += int32(1, 20, 3)
    before.token_ids[4, 31] = 17
    before.token_ids[7, MAX_LEN - 1] = 0
    before.num_tokens[4] = 32
    assert torch.equal(tables.num_computed, before.num_computed)
    assert torch.equal(tables.num_tokens, before.num_tokens)
    assert torch.equal(tables.token_ids, before.token_ids)


def test_advance_with_nothing_sampled() -> None:
    tables = make_tables({2: 5})
    before = tables.token_ids.clone()
    advance(tables, make_rows([2], [100]), int32(), int32())
    assert tables.num_computed[2] == 105
    assert torch.equal(tables.token_ids, before)


def test_more_requests_than_one_program_takes() -> None:
    num_slots = 300
    tables = RequestTables(
        torch.zeros(num_slots, 4, dtype=torch.int32),
        torch.ones(num_slots, dtype=torch.int32),
        torch.zeros(num_slots, dtype=torch.int32),
    )
    slots = torch.randperm(num_slots, dtype=torch.int32)
    sampled = torch.randint(1, 100, (num_slots,), dtype=torch.int32)
    rows = StepRows(slots, torch.arange(num_slots + 1, dtype=torch.int32), 1)
    advance(tables, rows, slots, sampled)
    assert (tables.num_computed == 1).all()
    assert (tables.num_tokens == 2).all()
    assert torch.equal(tables.token_ids[slots.long(), 1], sampled)


@pytest.mark.parametrize("num_samples", [0, 1, 256, 299])
def test_tokens_are_reported_in_turn(num_samples: int) -> None:
    """To the entry of the step that was received last, as they were sampled, those of padding too."""
    tables, num_entries = make_tables({0: 5}), 3
    reports = torch.full((num_entries, 300), -5, dtype=torch.int32)
    sampled = torch.randint(-1, 1000, (num_samples,), dtype=torch.int32)
    slots = torch.full((num_samples,), -1, dtype=torch.int32)
    turn = torch.tensor([(1 << 31) + 3, 0])
    advance(tables, make_rows([0], [1]), slots, sampled, Report(reports, turn))
    index = ((1 << 31) + 2) % num_entries
    assert reports[index].tolist() == [3, *sampled.tolist(), *[-5] * (299 - num_samples)]
    others = [entry for entry in range(num_entries) if entry != index]
    assert (reports[others] == -5).all()
    assert tables.num_computed[0] == 6


def test_positions_are_indexes_and_what_a_slot_adds() -> None:
    """Where the keys and values go, and which tokens are read, follows from the indexes."""
    tables, rows = make_tables({4: 30, 0: 10, 7: 3}), make_rows([4, 0, 7, -1], [2, 5, 1, 0])
    deltas = torch.full((NUM_SLOTS,), 1 << 20, dtype=torch.int32)
    deltas[torch.tensor([4, 0, 7])] = int32(-9, 0, 2)
    table = torch.randint(0, 1 << 20, (2, NUM_SLOTS, MAX_LEN // BLOCK_SIZE), dtype=torch.int32)
    results = []
    for given in (replace(tables, position_deltas=deltas), tables):
        out = StepTokens(*(torch.full((size,), -7, dtype=torch.int32) for size in (10, 10, 4)))
        groups = [GroupBlocks(each, torch.full_like(each[:4], -7), torch.full((10,), 9)) for each in table]
        expand(given, rows, BLOCK_SIZE, out, groups)
        results.append((out, groups))
    (moved, groups), (plain, plain_groups) = results
    assert moved.positions.tolist() == [21, 22, 10, 11, 12, 13, 14, 5, 0, 0]
    assert plain.positions.tolist() == [30, 31, 10, 11, 12, 13, 14, 3, 0, 0]
    assert torch.equal(moved.input_ids, plain.input_ids)
    for ours, theirs in zip(groups, plain_groups, strict=True):
        assert torch.equal(ours.slots, theirs.slots)
