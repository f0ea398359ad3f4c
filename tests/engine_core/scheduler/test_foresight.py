"""Tokens that are known before they are sampled. How they are scheduled is tested with random traffic."""

import numpy as np
import pytest

from tests.support.scheduling import Driver, Setting
from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.outputs import StepResult, TokenAppend


@pytest.fixture
def driver() -> Driver:
    """Two requests run, and a step that yields a token for each is under way."""
    driver = Driver(Setting(num_blocks=40, max_num_seqs=2, budget=64, depth=1))
    for request_id in (1, 2):
        driver.add(request_id, [3, 4, 5], SamplingParams(max_tokens=6, ignore_eos=True))
    return driver


def yielded(step: int, *token_ids: int) -> StepResult:
    return StepResult(step, np.array(token_ids, np.int32)[:, None], np.ones(len(token_ids), np.int32))


def test_they_come_with_the_token_in_front_and_are_computed_with_it(driver: Driver) -> None:
    scheduler = driver.scheduler
    first = scheduler.apply(scheduler.schedule())
    scheduler.foresee({1: [8, 9]})
    second = scheduler.apply(scheduler.schedule())
    slot, other = first.slots.tolist()
    assert second.known == [TokenAppend(other, 4, [8, 9])]
    assert dict(zip(second.slots.tolist(), second.num_scheduled.tolist(), strict=True)) == {slot: 1, other: 3}
    outcome = scheduler.commit(first, yielded(first.step, 20, 7))
    assert outcome.num_tokens.tolist() == [1, 3]
    assert outcome.token_ids.tolist() == [20, 7, 8, 9]
    assert scheduler.apply(scheduler.schedule()).known == []
    assert scheduler.counters.num_known_tokens == 2


def test_no_more_come_than_an_output_may_have(driver: Driver) -> None:
    scheduler = driver.scheduler
    first = scheduler.apply(scheduler.schedule())
    scheduler.foresee({0: list(range(20, 40))})
    outcome = scheduler.commit(first, yielded(first.step, 20, 7))
    assert outcome.num_tokens.tolist() == [6, 1]
    assert [request.request_id for request, _ in outcome.finished.values()] == [1]
    assert scheduler.apply(scheduler.schedule()).known == []


def test_they_leave_with_their_request(driver: Driver) -> None:
    scheduler = driver.scheduler
    first = scheduler.apply(scheduler.schedule())
    scheduler.foresee({0: [8, 9], 1: [8, 9]})
    scheduler.abort(1)
    driver.add(3, [3, 4, 5])
    second = scheduler.apply(scheduler.schedule())
    assert [start.slot for start in second.starts] == [first.slots[0]]
    assert [append.slot for append in second.known] == [first.slots[1]]
    outcome = scheduler.commit(first, yielded(first.step, 20, 7))
    assert (outcome.request_ids.tolist(), outcome.token_ids.tolist()) == ([2], [7, 8, 9])


def test_of_a_step_that_fails_nothing_comes(driver: Driver) -> None:
    scheduler = driver.scheduler
    first = scheduler.apply(scheduler.schedule())
    scheduler.foresee({0: [8, 9]})
    outcome = scheduler.fail_step(first, "no")
    assert len(outcome.token_ids) == 0
    assert scheduler.num_unfinished == 0


def test_what_has_left_before_it_is_known_leaves_its_slot_alone(driver: Driver) -> None:
    """Also if it waits in the queue again."""
    scheduler = driver.scheduler
    first = scheduler.apply(scheduler.schedule())
    scheduler._put_back(driver.requests[1])
    scheduler.foresee({0: [8, 9], 1: [8, 9]})
    second = scheduler.apply(scheduler.schedule())
    assert [start.slot for start in second.starts] == [first.slots[0]]
    assert [append.slot for append in second.known] == [first.slots[1]]
    scheduler.check_invariants()


def test_what_follows_a_stop_does_not_count(driver: Driver) -> None:
    driver.add(3, [3, 4], SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=(9,)))
    scheduler = driver.scheduler
    scheduler.abort(1)
    plan = scheduler.apply(scheduler.schedule())
    scheduler.foresee({0: [8], 1: [8, 9, 10, 11]})
    outcome = scheduler.commit(plan, yielded(plan.step, 20, 7))
    assert outcome.num_tokens.tolist() == [2, 3]
    assert scheduler.counters.num_known_tokens == 3
