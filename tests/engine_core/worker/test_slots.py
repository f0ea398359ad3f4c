"""The slot tables hold what plans brought, whichever way it crosses to the device."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.outputs import BlockAppend, SlotStart, StepPlan, TokenAppend
from tokenmill_engine.sampling.tokens import Rows
from tokenmill_engine.worker.cuda_writes import ScatterWriter
from tokenmill_engine.worker.slots import SlotShape, SlotTables
from tokenmill_engine.worker.step_ring import StepRing
from tokenmill_kernels.gpu import exchange

SHAPE = SlotShape(num_slots=4, max_len=50, max_blocks=6, num_groups=2, vocab_size=100)


def plan(starts: list[SlotStart], appends: list[BlockAppend]) -> StepPlan:
    return StepPlan(
        step=0,
        slots=np.array([0], np.int32),
        num_scheduled=np.array([1], np.int32),
        num_computed=np.array([0], np.int32),
        samples=np.array([True]),
        num_decodes=1,
        starts=starts,
        appends=appends,
    )


def start(
    slot: int, token_ids: list[int], num_prompt: int, num_computed: int, blocks: tuple[list[int], ...]
) -> SlotStart:
    return SlotStart(
        slot=slot,
        request_id=slot,
        token_ids=np.array(token_ids, np.int32),
        num_prompt_tokens=num_prompt,
        num_computed_tokens=num_computed,
        block_ids=blocks,
        sampling=SamplingParams(temperature=0.5, seed=slot),
        stop_token_ids=(),
    )


def scatter(max_runs: int, max_values: int) -> Callable[[SlotTables, StepPlan], None]:
    def write(tables: SlotTables, step: StepPlan) -> None:
        ScatterWriter(tables.buffer, max_runs, max_values).write(tables.changes(step))

    return write


def through_the_ring(tables: SlotTables, step: StepPlan) -> None:
    ring = StepRing(SHAPE.num_slots, tables.device)
    _, rest = ring.begin().write(step, tables.changes(step))
    assert not rest
    received = torch.zeros(4 * SHAPE.num_slots + 1, dtype=torch.int32)
    exchange.receive(received, tables.buffer, ring.turn, ring.sent, ring.shape)


class Tables:
    """Tables, and one of the ways to write into them."""

    def __init__(self, write: Callable[[SlotTables, StepPlan], None]) -> None:
        self.tables = SlotTables(SHAPE, torch.device("cpu"), shared=write is SlotTables.apply)
        self._write = write

    def apply(self, step: StepPlan) -> None:
        self._write(self.tables, step)


@pytest.fixture(
    params=[SlotTables.apply, through_the_ring, scatter(100, 1000), scatter(3, 7)],
    ids=["shared memory", "with the step", "one launch", "many launches"],
)
def written(request: pytest.FixtureRequest) -> Tables:
    """All ways to write; a GPU only has the others, whose kernels are interpreted here."""
    return Tables(request.param)


def test_starts_and_appends_reach_their_rows(written: Tables) -> None:
    tables = written.tables
    written.apply(plan([start(2, [5, 6, 7], 2, 1, ([11, 12], [21])), start(0, [9], 1, 0, ([13], []))], []))
    written.apply(plan([], [BlockAppend(2, 0, 2, [14, 15]), BlockAppend(2, 1, 1, [22]), BlockAppend(0, 1, 0, [23])]))
    assert tables.tokens.token_ids[2, :3].tolist() == [5, 6, 7]
    assert tables.tokens.token_ids[0, :1].tolist() == [9]
    assert tables.tokens.num_tokens.tolist() == [1, 0, 3, 0]
    assert tables.tokens.num_prompt.tolist() == tables.num_prompt.tolist() == [1, 0, 2, 0]
    assert tables.num_computed.tolist() == [0, 0, 1, 0]
    assert tables.block_tables[0].tolist() == [[13, 0, 0, 0, 0, 0], [0] * 6, [11, 12, 14, 15, 0, 0], [0] * 6]
    assert tables.block_tables[1].tolist() == [[23, 0, 0, 0, 0, 0], [0] * 6, [21, 22, 0, 0, 0, 0], [0] * 6]
    assert tables.sampling.integers[2].tolist() == [SHAPE.vocab_size, 2]
    assert tables.sampling.floats[2].tolist() == [0.5, 1.0, 0.0, 1.0, 0.0, 0.0]
    assert tables.sampling.floats[1].tolist() == [0.0] * 6


def test_known_tokens_follow_those_that_are_there(written: Tables) -> None:
    tables = written.tables
    written.apply(plan([start(2, [5, 6, 7], 2, 1, ([11], [21])), start(0, [9], 1, 0, ([13], []))], []))
    tables.tokens.token_ids[2, 3], tables.tokens.num_tokens[2] = 8, 4  # sampled
    written.apply(replace(plan([], []), known=[TokenAppend(2, 4, list(range(30, 42))), TokenAppend(0, 1, [3])]))
    assert tables.tokens.token_ids[2, :17].tolist() == [5, 6, 7, 8, *range(30, 42), 0]
    assert tables.tokens.token_ids[0, :3].tolist() == [9, 3, 0]
    assert tables.tokens.num_tokens.tolist() == [2, 0, 16, 0]
    assert tables.num_computed.tolist() == [0, 0, 1, 0]


def test_a_slot_can_be_started_again(written: Tables) -> None:
    tables = written.tables
    written.apply(plan([start(1, [1, 2, 3, 4], 4, 0, ([1], [2]))], []))
    written.apply(plan([start(1, [8, 9], 1, 1, ([5], [6]))], []))
    assert tables.tokens.token_ids[1, :2].tolist() == [8, 9]
    assert tables.tokens.num_tokens[1] == 2
    assert tables.num_computed[1] == 1
    assert tables.block_tables[0][1, 0] == 5


def test_rows_and_columns_at_the_ends(written: Tables) -> None:
    tables = written.tables
    written.apply(plan([start(3, list(range(50)), 50, 0, (list(range(6)), list(range(10, 16))))], []))
    assert tables.tokens.token_ids[3].tolist() == list(range(50))
    assert tables.block_tables[1][3].tolist() == list(range(10, 16))
    assert tables.tokens.token_ids[:3].abs().sum() == 0
    assert tables.block_tables[0][:3].abs().sum() == 0


def test_rows_split_into_pieces() -> None:
    rows = Rows(torch.arange(5), torch.arange(5) + 10)
    assert [piece.index.tolist() for piece in rows.pieces(2)] == [[0, 1], [2, 3], [4]]
    assert [piece.slots.tolist() for piece in rows.pieces(2)] == [[10, 11], [12, 13], [14]]
    assert rows.pieces(5) == [rows]
