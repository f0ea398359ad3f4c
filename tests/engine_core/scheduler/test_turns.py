"""Several steps under way in the stages of a pipeline: who is in which, and that no stage is idle."""

from collections import defaultdict

import pytest

from tests.support.scheduling import Driver, Setting
from tests.support.simulated_pipeline import SimulatedPipeline
from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.outputs import StepPlan
from tokenmill_engine.request import RequestState
from tokenmill_engine.scheduler.turns import steps_under_way


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + index) % 60 for index in range(length)]


def staged(num_stages: int, depth: int = 2, **setting: int) -> Driver:
    defaults = {"num_blocks": 2000, "max_num_seqs": 64, "budget": 256}
    return Driver(Setting(num_stages=num_stages, depth=depth, **{**defaults, **setting}))


def add_streams(driver: Driver, count: int, max_tokens: int = 40, first: int = 0, prompt_len: int = 8) -> None:
    for number in range(first, first + count):
        driver.add(number, prompt(prompt_len, number), SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def pipeline(driver: Driver) -> SimulatedPipeline:
    assert isinstance(driver.executor, SimulatedPipeline)
    return driver.executor


def share_busy(driver: Driver) -> float:
    """Of the time that passed, how much a stage computed."""
    return pipeline(driver).busy_s / pipeline(driver).now_s


def decode_plans(driver: Driver) -> list[StepPlan]:
    return [plan for plan in driver.plans if plan.num_decodes == plan.num_reqs]


def test_one_stage_has_as_many_steps_under_way_as_ever() -> None:
    assert [steps_under_way(1, is_async) for is_async in (False, True)] == [1, 2]
    assert [steps_under_way(4, is_async) for is_async in (False, True)] == [4, 5]


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("num_streams", [5, 7, 16, 33])
def test_streams_are_spread_evenly_and_every_stage_is_busy(num_stages: int, num_streams: int) -> None:
    driver = staged(num_stages)
    add_streams(driver, num_streams, max_tokens=100)
    driver.run()
    sizes = [plan.num_reqs for plan in decode_plans(driver)][num_stages:-num_stages]
    assert max(sizes) == -(-num_streams // num_stages)
    rounds = [sum(sizes[start : start + num_stages]) for start in range(0, len(sizes) - num_stages, num_stages)]
    assert sum(rounds) >= (num_streams - 1) * len(rounds)
    assert share_busy(driver) > 0.95


@pytest.mark.parametrize("num_stages", [2, 3])
def test_without_its_token_a_request_waits_and_alone_it_keeps_one_stage_busy(num_stages: int) -> None:
    """The simulated pipeline fails if a request is computed before its last token is known."""
    driver = staged(num_stages)
    add_streams(driver, 1)
    driver.run()
    assert pipeline(driver).most_in_flight == 1
    assert share_busy(driver) == pytest.approx(1 / num_stages)


def test_chunks_of_one_prompt_follow_each_other_through_the_stages() -> None:
    driver = staged(3, budget=8)
    add_streams(driver, 1, max_tokens=1, prompt_len=64)
    driver.run()
    assert [plan.num_tokens for plan in driver.plans] == [8] * 8
    assert pipeline(driver).most_in_flight == 4
    assert pipeline(driver).now_s == 8 + 2


def test_one_step_more_than_stages_hides_the_host_behind_prompts() -> None:
    busy = {}
    for depth in (1, 2):
        driver = staged(2, depth=depth, budget=8)
        pipeline(driver).host_s = 0.3
        add_streams(driver, 20, max_tokens=1)
        driver.run()
        busy[depth] = share_busy(driver)
    assert busy[1] < 0.9 < busy[2]


def test_the_step_beyond_the_stages_leaves_the_streams_to_the_others() -> None:
    driver = staged(2, budget=10)
    add_streams(driver, 6, max_tokens=60)
    driver.run()
    settled = [plan.num_reqs for plan in decode_plans(driver)][10:-10]
    assert set(settled) == {3}


def test_groups_that_became_unequal_even_out() -> None:
    """All streams of one step end at once; the other step's are divided."""
    driver = staged(2)
    add_streams(driver, 4, max_tokens=12)
    add_streams(driver, 4, max_tokens=60, first=4)
    driver.run()
    sizes = [plan.num_reqs for plan in decode_plans(driver)]
    assert set(sizes[4:16]) == {4}
    assert set(sizes[40:-4]) == {2}


@pytest.mark.parametrize("num_stages", [2, 4])
def test_nobody_is_passed_over_while_others_come_and_go(num_stages: int) -> None:
    """A stream gets its next token within two rounds of steps."""
    driver = staged(num_stages, max_num_seqs=24)
    add_streams(driver, 10, max_tokens=80)
    sampled: dict[int, list[int]] = defaultdict(list)
    number, seen = 10, 0
    while driver.step():
        if number < 60:
            add_streams(driver, 1, max_tokens=1 + number % 7, first=number)
            number += 1
        for plan in driver.plans[seen:]:
            for start in plan.starts:
                sampled[start.slot].clear()
            for slot in plan.slots[plan.samples].tolist():
                sampled[slot].append(plan.step)
                last = sampled[slot][-2:]
                assert last[-1] - last[0] <= 2 * num_stages
        seen = len(driver.plans)
    assert driver.scheduler.num_unfinished == 0


def test_preempting_waits_for_the_victim_and_not_for_every_stage() -> None:
    driver = staged(4, num_blocks=100, budget=64)
    add_streams(driver, 16, max_tokens=40, prompt_len=20)
    requests = [driver.scheduler.find(number) for number in range(16)]
    driver.run()
    assert driver.scheduler.counters.num_preemptions > 5
    assert share_busy(driver) > 0.85
    for request in requests:
        assert request is not None
        assert driver.told[request.request_id].tokens == driver.solo(request)


def test_the_victim_is_who_it_would_be_without_stages() -> None:
    driver = staged(2, num_blocks=8, max_num_seqs=4)
    requests = [
        driver.add(number, prompt(4, number * 10), SamplingParams(max_tokens=20, ignore_eos=True))
        for number in range(3)
    ]
    while driver.scheduler.counters.num_preemptions == 0:
        assert driver.step()
    assert [request.state for request in requests] == [RequestState.RUNNING] * 2 + [RequestState.PREEMPTED]
    driver.run()
    for request in requests:
        assert driver.told[request.request_id].tokens == driver.solo(request)


def test_a_step_of_prompts_is_as_small_as_one_with_streams_while_streams_wait_for_it() -> None:
    """By the default budget; all streams are in other steps."""
    driver = Driver(
        Setting(num_blocks=2000, budget=2048, num_stages=2, max_num_seqs=64, explicit_budget=False, block_size=16)
    )
    add_streams(driver, 2, max_tokens=60)
    for _ in range(6):
        driver.step()
    driver.add(9, prompt(3000), SamplingParams(max_tokens=1))
    driver.run()
    chunks = [plan.num_tokens for plan in driver.plans if plan.num_tokens > 16]
    assert max(chunks) <= 256 + 2
