"""Sampled tokens go back to the first stage once, to the right place, and not to who took the slot since."""

import numpy as np

from tokenmill_engine.executor.feedback import TokenFeedback
from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.outputs import SampledTokens, SlotStart, StepPlan, StepResult


def start_of(slot: int) -> SlotStart:
    return SlotStart(slot, slot, np.zeros(1, np.int32), 1, 0, ([0],), SamplingParams(), ())


def plan_of(step: int, rows: list[tuple[int, int, int, bool]], starts: tuple[int, ...] = ()) -> StepPlan:
    """Rows are (slot, computed, scheduled, samples)."""
    slots, computed, scheduled, samples = (np.array(column) for column in zip(*rows, strict=True))
    return StepPlan(
        step=step,
        slots=slots.astype(np.int32),
        num_scheduled=scheduled.astype(np.int32),
        num_computed=computed.astype(np.int32),
        samples=samples.astype(np.bool_),
        num_decodes=0,
        starts=[start_of(slot) for slot in starts],
    )


def result_of(plan: StepPlan, *tokens: int) -> StepResult:
    token_ids = np.array(tokens, dtype=np.int32)[:, np.newaxis]
    return StepResult(plan.step, token_ids, (token_ids[:, 0] >= 0).astype(np.int32))


def triples(sampled: SampledTokens | None) -> list[tuple[int, int, int]]:
    if sampled is None:
        return []
    columns = (sampled.slots, sampled.positions, sampled.token_ids)
    assert all(column.dtype == np.int32 for column in columns)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_a_token_goes_out_once_with_the_position_behind_what_was_computed() -> None:
    feedback = TokenFeedback()
    first = plan_of(1, [(3, 0, 5, True), (1, 8, 4, False), (0, 9, 1, True)], starts=(3,))
    assert triples(feedback.sent(first)) == []
    feedback.received(first, result_of(first, 70, -1, 71))
    assert triples(feedback.sent(plan_of(2, [(1, 12, 1, True)]))) == [(3, 5, 70), (0, 10, 71)]
    assert triples(feedback.sent(plan_of(3, [(3, 5, 1, True)]))) == []


def test_results_of_several_steps_go_out_together() -> None:
    feedback = TokenFeedback()
    plans = [plan_of(step, [(step, 4, 1, True)]) for step in (1, 2)]
    for plan in plans:
        feedback.sent(plan)
    for plan in plans:
        feedback.received(plan, result_of(plan, 50 + plan.step))
    assert triples(feedback.sent(plan_of(3, [(0, 0, 1, True)]))) == [(1, 5, 51), (2, 5, 52)]


def test_who_took_the_slot_meanwhile_does_not_get_the_token_of_who_left() -> None:
    feedback = TokenFeedback()
    old = plan_of(1, [(3, 0, 5, True), (4, 0, 5, True)], starts=(3, 4))
    feedback.sent(old)
    feedback.sent(plan_of(2, [(3, 0, 2, True)], starts=(3,)))
    feedback.received(old, result_of(old, 70, 71))
    assert triples(feedback.sent(plan_of(3, [(4, 5, 1, True)]))) == [(4, 5, 71)]


def test_a_start_beside_which_the_token_goes_out_comes_after_it() -> None:
    """The stage writes tokens first and starts requests then, so the old token does no harm."""
    feedback = TokenFeedback()
    old = plan_of(1, [(3, 0, 5, True)], starts=(3,))
    feedback.sent(old)
    feedback.received(old, result_of(old, 70))
    assert triples(feedback.sent(plan_of(2, [(3, 0, 2, True)], starts=(3,)))) == [(3, 5, 70)]


def test_every_new_token_of_a_row_goes_out() -> None:
    feedback = TokenFeedback()
    plan = plan_of(1, [(2, 6, 1, True), (5, 3, 1, True)])
    feedback.sent(plan)
    feedback.received(plan, StepResult(1, np.array([[10, 11], [12, -1]], np.int32), np.array([2, 1], np.int32)))
    assert triples(feedback.sent(plan_of(2, [(2, 9, 1, True)]))) == [(2, 7, 10), (2, 8, 11), (5, 4, 12)]
