"""What a step does: budget, chunks, admission, growth, victims. No device, no model."""

import logging

import pytest

from tests.support.scheduling import Driver, Setting
from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.outputs import StepPlan
from tokenmill_engine.request import RequestState
from tokenmill_engine.scheduler.budget import MIN_PREFILL_TOKENS

FOREVER = SamplingParams(max_tokens=None, ignore_eos=True)


def long_run(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + index) % 60 for index in range(length)]


def next_plan(driver: Driver) -> StepPlan:
    driver.step()
    return driver.plans[-1]


def rows(plan: StepPlan) -> list[tuple[int, bool]]:
    """(tokens, samples) of each row."""
    return list(zip(plan.num_scheduled.tolist(), plan.samples.tolist(), strict=True))


def test_nothing_to_do_is_no_decision() -> None:
    assert Driver(Setting()).scheduler.schedule() is None


def test_deciding_changes_nothing() -> None:
    driver = Driver(Setting(depth=1))
    driver.add(1, prompt(9))
    before = driver.scheduler.load
    first, second = driver.scheduler.schedule(), driver.scheduler.schedule()
    assert driver.scheduler.load == before
    assert first is not None
    assert second is not None
    assert [(a.request, a.num_scheduled) for a in first.admissions] == [
        (a.request, a.num_scheduled) for a in second.admissions
    ]
    driver.scheduler.check_invariants()


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    driver = Driver(Setting(budget=8, depth=1))
    driver.add(1, prompt(20), long_run(2))
    assert [rows(next_plan(driver)) for _ in range(4)] == [[(8, False)], [(8, False)], [(4, True)], [(1, True)]]


def test_running_requests_come_first_and_the_newcomer_gets_what_is_left() -> None:
    driver = Driver(Setting(budget=8, depth=1))
    driver.add(1, prompt(3), FOREVER)
    driver.add(2, prompt(3, 20), FOREVER)
    driver.step()
    driver.add(3, prompt(20, 40), FOREVER)
    plan = next_plan(driver)
    assert rows(plan) == [(1, True), (1, True), (6, False)]
    assert plan.num_decodes == 2


def test_a_prefill_in_progress_does_not_hold_decodes_back() -> None:
    """The long prompt was admitted before the short one's first decode, yet the decode comes first."""
    driver = Driver(Setting(budget=4, depth=1, max_num_seqs=3))
    driver.add(1, prompt(2), FOREVER)
    driver.add(2, prompt(30), FOREVER)
    plans = [next_plan(driver) for _ in range(4)]
    assert [rows(plan) for plan in plans[1:]] == [[(1, True), (3, False)]] * 3
    assert all(plan.num_decodes == 1 for plan in plans[1:])


def test_a_prompt_of_one_token_is_a_decode_row() -> None:
    driver = Driver(Setting(depth=1))
    driver.add(1, prompt(5), FOREVER)
    driver.add(2, [3], FOREVER)
    plan = next_plan(driver)
    assert rows(plan) == [(1, True), (5, True)]
    assert plan.num_decodes == 1
    assert plan.starts[1].slot == plan.slots[0]


def test_slots_limit_the_running_requests_and_the_rest_wait_in_order() -> None:
    driver = Driver(Setting(max_num_seqs=2, depth=1))
    requests = [driver.add(number, prompt(2), long_run(3)) for number in range(4)]
    driver.step()
    assert [request.state for request in requests] == [RequestState.RUNNING] * 2 + [RequestState.WAITING] * 2
    driver.run()
    assert [request.first_scheduled_time for request in requests] == sorted(r.first_scheduled_time for r in requests)


def test_priority_goes_before_arrival_and_arrival_before_nothing() -> None:
    driver = Driver(Setting(max_num_seqs=1, policy="priority", depth=1))
    order = [
        driver.add(1, prompt(2), priority=5, arrival_time=1.0),
        driver.add(2, prompt(2), priority=0, arrival_time=3.0),
    ]
    order.append(driver.add(3, prompt(2), priority=0, arrival_time=2.0))
    driver.run()
    assert sorted(order, key=lambda request: request.first_scheduled_time) == [order[2], order[1], order[0]]


def test_a_request_is_admitted_only_if_all_of_its_prompt_fits() -> None:
    """Budget and slots would let the first chunk in; the blocks for the whole prompt are not there."""
    driver = Driver(Setting(num_blocks=8, block_size=4, budget=4, depth=1))
    first = driver.add(1, prompt(16), long_run(4))
    driver.step()
    second = driver.add(2, prompt(17, 30), long_run(2))
    while driver.scheduler.find(1) is first:
        assert second.state is RequestState.WAITING
        driver.step()
    driver.run()
    assert driver.scheduler.counters.num_preemptions == 0


def test_the_head_of_the_queue_is_not_overtaken_by_one_that_fits() -> None:
    driver = Driver(Setting(num_blocks=8, block_size=4, depth=1))
    driver.add(1, prompt(12), long_run(4))
    driver.step()
    big, small = driver.add(2, prompt(24, 20), long_run(2)), driver.add(3, prompt(2), long_run(2))
    driver.step()
    assert big.state is small.state is RequestState.WAITING


def test_admission_leaves_a_block_for_each_other_running_request() -> None:
    driver = Driver(Setting(num_blocks=6, block_size=4, depth=1))
    driver.add(1, prompt(8), long_run(12))
    driver.step()
    second = driver.add(2, prompt(14, 30), long_run(2))
    driver.step()
    assert second.state is RequestState.WAITING  # 4 blocks are free, and one of them is the first one's to grow into
    third = driver.add(3, prompt(2), long_run(2))
    driver.abort(2)
    driver.step()
    assert third.state is RequestState.RUNNING


def test_blocks_are_sent_once_at_the_start_and_then_only_what_is_new() -> None:
    driver = Driver(Setting(block_size=4, depth=1, num_groups=2))
    driver.add(1, prompt(6), long_run(8))
    start = next_plan(driver).starts[0]
    assert [len(table) for table in start.block_ids] == [2, 2]
    appends = [append for _ in range(7) for append in next_plan(driver).appends]
    assert [(append.group, append.start, len(append.block_ids)) for append in appends] == [
        (0, 2, 1),
        (1, 2, 1),
        (0, 3, 1),
        (1, 3, 1),
    ]


def test_nothing_is_scheduled_beyond_the_last_token() -> None:
    """The device checks it too: its fake asserts that no request ever has more tokens than it may."""
    driver = Driver(Setting(depth=3))
    driver.add(1, prompt(3), long_run(4))
    driver.run()
    assert driver.executor.num_tokens == 3 + 3


class TestPreemption:
    """The pool holds 8 blocks of 4 tokens."""

    @staticmethod
    def crowded(policy: str = "fcfs", depth: int = 1) -> Driver:
        return Driver(Setting(num_blocks=8, block_size=4, max_num_seqs=4, policy=policy, depth=depth))  # type: ignore[arg-type]

    @staticmethod
    def step_until_preempted(driver: Driver, count: int = 1) -> None:
        while driver.scheduler.counters.num_preemptions < count:
            assert driver.step()

    def test_the_last_admitted_is_the_first_victim_and_everybody_finishes_as_if_alone(self) -> None:
        driver = self.crowded()
        requests = [driver.add(number, prompt(4, number * 10), long_run(20)) for number in range(3)]
        self.step_until_preempted(driver)
        assert [request.state.name for request in requests] == ["RUNNING", "RUNNING", "PREEMPTED"]
        driver.run()
        for request in requests:
            assert driver.told[request.request_id].tokens == driver.solo(request)

    def test_who_was_preempted_once_is_not_the_first_victim_again(self) -> None:
        driver = self.crowded()
        lengths = [10, 20, 20]
        requests = [driver.add(number, prompt(4, number * 10), long_run(lengths[number])) for number in range(3)]
        self.step_until_preempted(driver)
        assert [request.num_preemptions for request in requests] == [0, 0, 1]
        # The first one finishes, the victim comes back as the last admitted, and space runs out again.
        self.step_until_preempted(driver, 2)
        assert [request.num_preemptions for request in requests] == [0, 1, 1]
        assert requests[2].state is RequestState.RUNNING
        driver.run()

    def test_by_priority_the_least_urgent_gives_way(self) -> None:
        driver = self.crowded("priority")
        urgent_last = [
            driver.add(number, prompt(4, number * 10), long_run(20), priority=2 - number) for number in range(3)
        ]
        self.step_until_preempted(driver)
        assert [request.state.name for request in urgent_last] == ["PREEMPTED", "RUNNING", "RUNNING"]

    def test_of_equal_priority_the_later_arrival_gives_way(self) -> None:
        driver = self.crowded("priority")
        requests = [
            driver.add(number, prompt(4, number * 10), long_run(20), arrival_time=9.0 - number) for number in range(3)
        ]
        self.step_until_preempted(driver)
        assert [request.state.name for request in requests] == ["PREEMPTED", "RUNNING", "RUNNING"]

    def test_protection_from_a_second_preemption_does_not_beat_priority(self) -> None:
        driver = self.crowded("priority")
        low = driver.add(1, prompt(4), long_run(26), priority=1)
        urgent = [driver.add(number, prompt(4, number * 10), long_run(26)) for number in (2, 3)]
        driver.run()
        assert low.num_preemptions > 0
        assert max(request.num_preemptions for request in urgent) <= 1

    def test_nothing_is_admitted_in_the_step_that_preempts(self) -> None:
        driver = self.crowded()
        for number in range(3):
            driver.add(number, prompt(4, number * 10), long_run(20))
        driver.step()
        while not (decision := driver.scheduler.schedule()) or not decision.preempted:
            driver.step()
        small = driver.add(9, [1], long_run(2), arrival_time=-1.0)
        driver.step()
        assert driver.scheduler.counters.num_preemptions == 1
        assert small.state is RequestState.WAITING

    def test_a_preempted_request_waits_in_front(self) -> None:
        driver = self.crowded()
        requests = [driver.add(number, prompt(4, number * 10), long_run(20)) for number in range(5)]
        self.step_until_preempted(driver)
        victim = next(request for request in requests if request.state is RequestState.PREEMPTED)
        others = [request for request in requests if request.state is RequestState.WAITING]
        assert others
        driver.run()
        assert victim.first_token_time < min(request.first_token_time for request in others)

    @pytest.mark.parametrize("depth", [2, 3])
    def test_steps_in_flight_are_awaited_first_so_that_no_token_is_lost(self, depth: int) -> None:
        driver = self.crowded(depth=depth)
        requests = [driver.add(number, prompt(4, number * 10), long_run(20)) for number in range(3)]
        self.step_until_preempted(driver)
        victim = next(request for request in requests if request.state is RequestState.PREEMPTED)
        assert driver.told[victim.request_id].tokens == victim.saved_output.tolist()
        driver.run()
        decoded = sum(plan.num_tokens for plan in driver.plans)
        recomputed = decoded - 3 * (4 + 19)
        assert 0 < recomputed <= driver.scheduler.counters.num_preemptions * 24

    def test_the_warning_names_cause_effect_and_remedies_and_counts(self, caplog: pytest.LogCaptureFixture) -> None:
        driver = self.crowded()
        requests = [driver.add(number, prompt(4, number * 10), long_run(26)) for number in range(3)]
        with caplog.at_level(logging.WARNING):
            driver.run()
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        total = driver.scheduler.counters.num_preemptions
        assert total == sum(request.num_preemptions for request in requests) == len(warnings)
        for number, text in enumerate(warnings, start=1):
            assert f"total_cumulative_preemption_cnt={number}" in text
            assert "not enough KV cache space" in text
            assert "RECOMPUTE" in text
            assert "end-to-end performance" in text
            assert "raise kv_cache_memory_bytes (on a GPU gpu_memory_utilization) or tensor_parallel_size for" in text
            assert "or lower max_num_seqs." in text
            assert any(f"Request {request.label} ({request.request_id})" in text for request in requests)


def test_who_has_several_tokens_to_compute_is_a_stream_all_the_same() -> None:
    """A prompt beside it gets no more than beside one that computes a single token, but for those."""
    driver = Driver(Setting(num_blocks=2000, budget=4096, explicit_budget=False, depth=1))
    driver.add(1, prompt(3), FOREVER, known={0: prompt(9), 2: prompt(200)})
    next_plan(driver)
    driver.add(2, prompt(3000), FOREVER)
    plans = [next_plan(driver) for _ in range(4)]
    assert next(rows(plan)[0] for plan in plans if plan.num_reqs > 1) == (10, True)
    assert all(plan.num_tokens < 1000 for plan in plans)


def test_who_knows_a_few_tokens_waits_for_nobody_and_leaves_something_to_prompts() -> None:
    """Neither for others that know more, nor for one that knows hundreds, which is computed as prompts are."""
    driver = Driver(Setting(num_blocks=4000, max_num_seqs=40, budget=4096, explicit_budget=False, depth=1))
    long, short = 32, 3
    for number in range(32):
        driver.add(number, prompt(3, number), FOREVER, known={0: prompt(long if number % 2 else short)})
    driver.add(32, prompt(3), FOREVER, known={0: prompt(2000)})
    next_plan(driver)
    driver.add(33, prompt(3000), FOREVER)
    plan = next_plan(driver)
    counts = sorted(count for count, samples in rows(plan) if samples)
    assert counts == [1 + short] * 16 + [1 + long] * 16
    assert plan.num_tokens - sum(counts) >= MIN_PREFILL_TOKENS
    assert not [count for count, samples in rows(plan) if not samples and count > 512]


def test_of_known_tokens_too_a_step_computes_no_more_than_its_budget() -> None:
    driver = Driver(Setting(num_blocks=400, budget=8, depth=1))
    for number in range(3):
        driver.add(number, prompt(2, number), FOREVER, known={0: prompt(5)})
    next_plan(driver)
    assert rows(next_plan(driver)) == [(6, True), (2, False)]
    assert driver.step()
    driver.scheduler.check_invariants()
