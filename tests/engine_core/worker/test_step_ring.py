"""Entries of steps in flight: in turn, and never lost when more of them are taken than there are."""

import numpy as np
import pytest
import torch

from tokenmill_engine.errors import EngineDeadError
from tokenmill_engine.outputs import StepPlan
from tokenmill_engine.worker.slots import Write
from tokenmill_engine.worker.step_ring import NUM_ENTRIES, StepRing, StepTokens
from tokenmill_kernels.gpu import exchange, state

NUM_ROWS = 6
CPU = torch.device("cpu")


def plan(num_reqs: int) -> StepPlan:
    ones = np.ones(num_reqs, np.int32)
    return StepPlan(0, np.arange(num_reqs, dtype=np.int32), ones, ones, np.ones(num_reqs, np.bool_), num_reqs)


def step(ring: StepRing, tokens: list[int]) -> StepTokens:
    """One that reports `tokens`, its kernels interpreted."""
    entry = ring.begin()
    entry.write(plan(len(tokens)), [])
    received, tables = torch.zeros(4 * NUM_ROWS + 1, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    exchange.receive(received, tables, ring.turn, ring.sent, ring.shape)
    turn = ring.count()
    no_row = state.StepRows(received[:0], received[:1], 1)
    requests = state.RequestTables(tables.view(3, 3), tables[:3], tables[:3])
    sampled = torch.tensor(tokens, dtype=torch.int32)
    report = exchange.Report(ring.received, ring.turn)
    state.advance(requests, no_row, torch.full_like(sampled, -1), sampled, report)
    return entry.finish(turn, len(tokens))


def fail_after_receiving(ring: StepRing) -> None:
    """A step of which the device hears, but that goes no further."""
    ring.begin().write(plan(3), [])
    received, tables = torch.zeros(4 * NUM_ROWS + 1, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    exchange.receive(received, tables, ring.turn, ring.sent, ring.shape)
    ring.count()


class Event:
    """A device's, which notes in `waits` that it is waited for."""

    def __init__(self, waits: list[int], number: int) -> None:
        self._waits, self._number = waits, number
        self._is_recorded = False

    def record(self) -> None:
        self._is_recorded = True

    def synchronize(self) -> None:
        assert self._is_recorded
        self._waits.append(self._number)

    def elapsed_time(self, end: "Event") -> float:
        return 1.0


@pytest.mark.slow
def test_results_stay_when_their_entries_are_used_again() -> None:
    ring = StepRing(NUM_ROWS, CPU)
    expected = [[number] * (1 + number % NUM_ROWS) for number in range(3 * NUM_ENTRIES)]
    in_flight = [step(ring, tokens) for tokens in expected]
    for tokens, result in zip(expected, in_flight, strict=True):
        assert result.wait()[0].tolist() == tokens
        assert result.wait()[0].tolist() == tokens


def test_a_step_that_fails_before_it_is_received_changes_nothing() -> None:
    ring = StepRing(NUM_ROWS, CPU)
    assert step(ring, [1]).wait()[0].tolist() == [1]
    ring.begin().write(plan(3), [])
    assert step(ring, [2, 3]).wait()[0].tolist() == [2, 3]


def test_a_step_that_fails_after_it_was_received_costs_its_entry_alone() -> None:
    ring = StepRing(NUM_ROWS, CPU)
    first = step(ring, [1])
    fail_after_receiving(ring)
    second = step(ring, [2, 3])
    assert first.wait()[0].tolist() == [1]
    assert second.wait()[0].tolist() == [2, 3]


@pytest.mark.parametrize("is_received", [False, True])
def test_an_entry_is_not_written_while_the_device_may_read_it(
    monkeypatch: pytest.MonkeyPatch, is_received: bool
) -> None:
    """That of a failed step comes to its next turn without a result that could be waited for."""
    ring, waits = StepRing(NUM_ROWS, CPU), list[int]()
    for number, entry in enumerate(ring._entries):
        monkeypatch.setattr(entry, "events", (Event(waits, number), Event(waits, number)))
    if is_received:
        fail_after_receiving(ring)
    else:
        ring.begin().write(plan(3), [])
    for tokens in range(NUM_ENTRIES - is_received):
        step(ring, [tokens]).wait()
    waits.clear()
    for _ in range(2):
        ring.begin()
    assert waits == [0] * is_received


def test_an_answer_to_another_step_is_noticed() -> None:
    ring = StepRing(NUM_ROWS, CPU)
    result = step(ring, [1])
    ring.received.fill_(7)
    with pytest.raises(EngineDeadError, match="answered step 7 of its count instead of 1"):
        result.wait()


def test_begin_anew() -> None:
    ring = StepRing(NUM_ROWS, CPU)
    for _ in range(3):
        step(ring, [1])
    ring.clear()
    assert ring.turn.tolist() == [0, 0]
    assert step(ring, [4]).wait()[0].tolist() == [4]


def test_what_does_not_fit_is_left() -> None:
    ring = StepRing(NUM_ROWS, CPU)
    shape = ring.shape
    words: list[Write] = [(number, [number]) for number in range(shape.max_words)]
    runs: list[Write] = [(10_000, list(range(17))) for _ in range(shape.max_runs - 2)]
    long: list[Write] = [(0, np.zeros(shape.max_values, np.int32)), (1, np.arange(20, dtype=np.int32))]
    _, rest = ring.begin().write(plan(1), [*words, *runs[:200], *long, *runs[200:], (5, [6])])
    assert rest[0] is long[0] or rest[0][1] is long[0][1]
    number_of_runs = int(ring.sent[0, exchange.NUM_RUNS])
    assert int(ring.sent[0, exchange.NUM_WORDS]) == shape.max_words
    assert number_of_runs + len(rest) == len(runs) + len(long) + 1
    assert number_of_runs <= shape.max_runs
