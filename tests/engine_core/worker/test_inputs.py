"""Prepared inputs against a token-by-token computation, and the tables after a step."""

import numpy as np
import pytest
import torch

from tokenmill_engine.attention.batch import ForwardBatch
from tokenmill_engine.outputs import StepPlan
from tokenmill_engine.worker.cuda_inputs import CudaInputs
from tokenmill_engine.worker.inputs import CpuPreparer
from tokenmill_engine.worker.shapes import Ladder, StepShape, exact_shape
from tokenmill_engine.worker.slots import SlotShape, SlotTables

BLOCK_SIZE = 4
SHAPE = SlotShape(num_slots=6, max_len=40, max_blocks=10, num_groups=2, vocab_size=100)


def filled_tables(rng: np.random.Generator) -> SlotTables:
    tables = SlotTables(SHAPE, torch.device("cpu"))
    tables.tokens.token_ids.copy_(torch.from_numpy(rng.integers(0, 100, (6, 40))))
    for table in tables.block_tables:
        table.copy_(torch.from_numpy(rng.permutation(60).reshape(6, 10)))
    return tables


def random_plan(rng: np.random.Generator, tables: SlotTables, num_decodes: int, num_chunks: int) -> StepPlan:
    num_reqs = num_decodes + num_chunks
    slots = rng.permutation(6)[:num_reqs].astype(np.int32)
    counts = np.concatenate([np.ones(num_decodes), rng.integers(1, 9, num_chunks)]).astype(np.int32)
    computed = rng.integers(0, 30, num_reqs).astype(np.int32)
    samples = np.concatenate([np.ones(num_decodes), rng.integers(0, 2, num_chunks)]).astype(np.bool_)
    tables.num_computed[torch.from_numpy(slots).long()] = torch.from_numpy(computed)
    known = computed + counts + np.where(samples, 0, 3).astype(np.int32)
    tables.tokens.num_tokens[torch.from_numpy(slots).long()] = torch.from_numpy(known)
    return StepPlan(0, slots, counts, computed, samples, num_decodes)


@pytest.mark.parametrize(("num_decodes", "num_chunks"), [(0, 1), (0, 3), (1, 0), (3, 0), (4, 0), (2, 2), (4, 1)])
@pytest.mark.parametrize("padded", [False, True])
def test_device_kernels_prepare_the_same(num_decodes: int, num_chunks: int, padded: bool) -> None:
    """The GPU's way, its kernels interpreted, with exact and with padded sizes, against the CPU's; two steps in a
    row."""
    rng = np.random.default_rng(1)
    on_cpu, on_device = filled_tables(rng), filled_tables(np.random.default_rng(1))
    cpu = CpuPreparer(on_cpu, BLOCK_SIZE)
    ladder = Ladder(max_num_seqs=6, max_tokens=64)
    device = CudaInputs(on_device, BLOCK_SIZE, ladder.num_rows, max_tokens=64)
    for _ in range(2):
        plan = random_plan(rng, on_cpu, num_decodes, num_chunks)
        on_device.num_computed.copy_(on_cpu.num_computed)
        on_device.tokens.num_tokens.copy_(on_cpu.tokens.num_tokens)
        expected = cpu.prepare(plan)
        rows = device.stage(plan, device.ring.begin())
        device.receive()
        device.ring.count()
        num_samples = len(expected.rows.sample_rows)
        shape = ladder.padded(plan) if padded else exact_shape(plan, num_samples)
        assert shape is not None
        check_batch(device.expand(shape), expected.batch, shape)
        for field in ("query_start", "sample_rows", "sample_slots"):
            np.testing.assert_array_equal(getattr(rows, field), getattr(expected.rows, field))
        assert rows.max_tokens == expected.rows.max_tokens
        if expected.logit_index is None:
            assert shape.num_outputs is None
        else:
            assert shape.num_outputs is not None
            assert shape.num_outputs >= num_samples
            chosen = device.logit_index.tolist()
            assert chosen == [*expected.logit_index.tolist()[:num_samples], *[-1] * (len(chosen) - num_samples)]
        sampled = torch.arange(60, 60 + num_samples, dtype=torch.int32)
        cpu.advance(plan, expected.rows, sampled)
        rows_that_sample = ladder.sample_size(num_samples) if padded and num_samples else num_samples
        device.advance(torch.cat((sampled, torch.full((rows_that_sample - num_samples,), 99, dtype=torch.int32))))
        assert on_device.num_computed.equal(on_cpu.num_computed)
        assert on_device.tokens.num_tokens.equal(on_cpu.tokens.num_tokens)
        assert on_device.tokens.token_ids.equal(on_cpu.tokens.token_ids)


def check_batch(actual: ForwardBatch, expected: ForwardBatch, shape: StepShape) -> None:
    """`actual` has the sizes of `shape`, begins as `expected` and goes on as padding does."""
    more_rows, more_tokens = shape.num_rows - expected.num_reqs, shape.num_tokens - expected.num_tokens
    assert (actual.num_reqs, actual.num_tokens) == (shape.num_rows, shape.num_tokens)
    assert actual.max_query_len >= expected.max_query_len
    assert (actual.max_query_len == 1) == (shape.num_outputs is None)
    assert actual.input_ids.tolist() == expected.input_ids.tolist() + [0] * more_tokens
    assert actual.positions.tolist() == expected.positions.tolist() + [0] * more_tokens
    starts = expected.query_start_loc.tolist()
    assert actual.query_start_loc.tolist() == starts + [expected.num_tokens] * more_rows
    assert actual.seq_lens.tolist() == expected.seq_lens.tolist() + [0] * more_rows
    for ours, theirs in zip(actual.groups, expected.groups, strict=True):
        assert ours.slot_mapping.tolist() == theirs.slot_mapping.tolist() + [-1] * more_tokens
        for row, length in enumerate(expected.seq_lens.tolist()):
            used = -(-length // BLOCK_SIZE)
            assert ours.block_tables[row, :used].equal(theirs.block_tables[row, :used])


def test_inputs_without_a_request() -> None:
    """What graphs are captured on: every row and token is padding, and nothing is written."""
    tables = filled_tables(np.random.default_rng(1))
    before = tables.tokens.token_ids.clone()
    ladder = Ladder(max_num_seqs=6, max_tokens=64)
    inputs = CudaInputs(tables, BLOCK_SIZE, ladder.num_rows, max_tokens=64)
    inputs.stage(
        random_plan(np.random.default_rng(1), filled_tables(np.random.default_rng(1)), 2, 2), inputs.ring.begin()
    )
    inputs.ring.clear()
    for shape in ladder.shapes():
        inputs.receive()
        batch = inputs.expand(shape)
        assert batch.seq_lens.tolist() == [0] * shape.num_rows
        assert all(group.slot_mapping.tolist() == [-1] * shape.num_tokens for group in batch.groups)
    inputs.advance(torch.full((6,), 5, dtype=torch.int32))
    assert tables.tokens.token_ids.equal(before)
    assert not tables.num_computed.any()
    assert not tables.tokens.num_tokens.any()


def test_steps_larger_than_the_buffers_are_refused() -> None:
    rng = np.random.default_rng(0)
    tables = filled_tables(rng)
    plan = random_plan(rng, tables, 2, 3)
    for num_rows, max_tokens in ((4, 64), (6, 4)):
        inputs = CudaInputs(tables, BLOCK_SIZE, num_rows, max_tokens)
        with pytest.raises(ValueError, match="more than the buffers hold"):
            inputs.stage(plan, inputs.ring.begin())


@pytest.mark.parametrize("num_decodes", [0, 1, 4])
@pytest.mark.parametrize("num_chunks", [0, 1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_inputs_match_a_loop_over_tokens(num_decodes: int, num_chunks: int, seed: int) -> None:
    if num_decodes + num_chunks == 0:
        num_chunks = 3
    rng = np.random.default_rng(seed)
    tables = filled_tables(rng)
    plan = random_plan(rng, tables, num_decodes, num_chunks)
    inputs = CpuPreparer(tables, BLOCK_SIZE).prepare(plan)

    ids, positions, starts, lengths = [], [], [0], []
    slot_mappings: list[list[int]] = [[], []]
    for slot, count, computed in zip(plan.slots, plan.num_scheduled, plan.num_computed, strict=True):
        for position in range(computed, computed + count):
            ids.append(int(tables.tokens.token_ids[slot, position]))
            positions.append(position)
            for group, table in enumerate(tables.block_tables):
                block = int(table[slot, position // BLOCK_SIZE])
                slot_mappings[group].append(block * BLOCK_SIZE + position % BLOCK_SIZE)
        starts.append(len(ids))
        lengths.append(int(computed + count))
    batch = inputs.batch
    assert batch.input_ids.tolist() == ids
    assert batch.positions.tolist() == positions
    assert batch.query_start_loc.tolist() == inputs.rows.query_start.tolist() == starts
    assert batch.seq_lens.tolist() == lengths
    assert (batch.num_reqs, batch.num_tokens, batch.num_decodes) == (plan.num_reqs, len(ids), num_decodes)
    assert batch.max_query_len == max(plan.num_scheduled)
    assert batch.max_seq_len == inputs.rows.max_tokens == max(lengths)
    for group, table in enumerate(tables.block_tables):
        assert batch.groups[group].slot_mapping.tolist() == slot_mappings[group]
        for row, slot in enumerate(plan.slots):
            used = -(-lengths[row] // BLOCK_SIZE)
            assert batch.groups[group].block_tables[row, :used].tolist() == table[slot, :used].tolist()
    for tensor in (batch.input_ids, batch.positions, batch.query_start_loc, batch.seq_lens):
        assert tensor.dtype == torch.int32
    assert batch.groups[0].slot_mapping.dtype == torch.int64

    assert inputs.rows.sample_rows.tolist() == np.flatnonzero(plan.samples).tolist()
    assert inputs.rows.sample_slots.tolist() == plan.slots[plan.samples].tolist()
    last_tokens = [end - 1 for end, samples in zip(starts[1:], plan.samples, strict=True) if samples]
    index = list(range(len(ids))) if inputs.logit_index is None else inputs.logit_index.tolist()
    assert index == (last_tokens or [0])


def test_advance_counts_and_appends() -> None:
    rng = np.random.default_rng(0)
    tables = filled_tables(rng)
    plan = random_plan(rng, tables, 2, 3)
    preparer = CpuPreparer(tables, BLOCK_SIZE)
    inputs = preparer.prepare(plan)
    before = tables.tokens.num_tokens.clone()
    sampled = torch.arange(50, 50 + len(inputs.rows.sample_slots), dtype=torch.int32)
    sampled[0] = -1
    preparer.advance(plan, inputs.rows, sampled)
    for row, slot in enumerate(plan.slots):
        assert tables.num_computed[slot] == plan.num_computed[row] + plan.num_scheduled[row]
        assert tables.tokens.num_tokens[slot] == before[slot] + plan.samples[row]
    for token, slot in zip(sampled.tolist(), inputs.rows.sample_slots.tolist(), strict=True):
        assert tables.tokens.token_ids[slot, before[slot]] == max(token, 0)


def test_a_full_row_does_not_run_into_the_next() -> None:
    tables = filled_tables(np.random.default_rng(0))
    tables.num_computed[2] = 39
    tables.tokens.num_tokens[2] = 40
    tables.tokens.token_ids[3, 0] = 77
    one = np.array([1], np.int32)
    plan = StepPlan(0, np.array([2], np.int32), one, np.array([39], np.int32), np.array([True]), 1)
    preparer = CpuPreparer(tables, BLOCK_SIZE)
    preparer.advance(plan, preparer.prepare(plan).rows, torch.tensor([5], dtype=torch.int32))
    assert tables.tokens.token_ids[3, 0] == 77
    assert tables.tokens.token_ids[2, 39] == 5
    assert tables.tokens.num_tokens[2] == 40
