"""Commit, stops, prefix cache, aborts and errors, with the hash model as device."""

import dataclasses

import numpy as np
import pytest

from tests.support.fake_executor import EOS, solo_run
from tests.support.scheduling import Driver, Setting
from tokenmill_engine.ipc.ids import make_request_id
from tokenmill_engine.messages import FinishReason, SamplingParams
from tokenmill_engine.outputs import StepResult
from tokenmill_engine.request import RequestState

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + index) % 60 for index in range(length)]


def answer(sampling: SamplingParams, tokens: list[int] | None = None, depth: int = 2) -> tuple[list[int], FinishReason]:
    driver = Driver(Setting(depth=depth))
    driver.add(1, tokens or prompt(5), sampling)
    driver.run()
    told = driver.told[1]
    assert len(told.finishes) == 1
    return told.tokens, told.finishes[0]


def prompt_reaching_eos() -> tuple[list[int], list[int]]:
    """A prompt whose answer ends with the end token after at least three tokens, and that answer."""
    for first in range(60):
        tokens, reason = solo_run(prompt(5, first), SamplingParams(max_tokens=100), 1000)
        if reason == "stop" and 3 <= len(tokens) < 50:
            return prompt(5, first), tokens
    raise AssertionError("no such prompt")


class TestStops:
    @DEPTHS
    def test_the_end_token_ends_and_is_part_of_the_output(self, depth: int) -> None:
        tokens, expected = prompt_reaching_eos()
        assert answer(SamplingParams(max_tokens=100), tokens, depth) == (expected, FinishReason.STOP)
        assert expected[-1] == EOS

    @DEPTHS
    def test_ignoring_the_end_token_goes_on_to_the_limit(self, depth: int) -> None:
        tokens, expected = prompt_reaching_eos()
        output, reason = answer(SamplingParams(max_tokens=60, ignore_eos=True), tokens, depth)
        assert (len(output), reason) == (60, FinishReason.LENGTH)
        assert output[: len(expected)] == expected

    @DEPTHS
    def test_a_stop_token_of_the_request_is_named(self, depth: int) -> None:
        free, _ = answer(SamplingParams(max_tokens=12, ignore_eos=True))
        position = 5
        stop = free[position]
        driver = Driver(Setting(depth=depth))
        driver.add(1, prompt(5), SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=(stop,)))
        driver.run()
        assert driver.told[1].tokens == free[: free.index(stop) + 1]
        assert driver.told[1].finishes == [FinishReason.STOP]
        assert driver.told[1].stop_token_id == stop

    def test_the_models_own_end_token_is_not_named(self) -> None:
        tokens, _ = prompt_reaching_eos()
        driver = Driver(Setting())
        driver.add(1, tokens, SamplingParams(max_tokens=100, stop_token_ids=(EOS,)))
        driver.run()
        assert driver.told[1].stop_token_id is None

    def test_no_stop_before_min_tokens(self) -> None:
        tokens, expected = prompt_reaching_eos()
        output, _ = answer(SamplingParams(max_tokens=100, min_tokens=len(expected) + 1), tokens)
        assert len(output) > len(expected)
        assert output[: len(expected)] == expected

    @DEPTHS
    def test_max_tokens_ends_with_length(self, depth: int) -> None:
        output, reason = answer(SamplingParams(max_tokens=1, ignore_eos=True), depth=depth)
        assert (len(output), reason) == (1, FinishReason.LENGTH)

    @DEPTHS
    def test_an_output_that_fills_the_pool_ends_with_length(self, depth: int) -> None:
        driver = Driver(Setting(num_blocks=4, block_size=4, depth=depth))
        driver.add(1, prompt(5), SamplingParams(max_tokens=None, ignore_eos=True))
        driver.run()
        assert len(driver.told[1].tokens) == 16 - 5
        assert driver.told[1].finishes == [FinishReason.LENGTH]

    @DEPTHS
    def test_scoring_a_prompt_yields_no_token(self, depth: int) -> None:
        driver = Driver(Setting(depth=depth, budget=4))
        driver.add(1, prompt(9), SamplingParams(max_tokens=0, prompt_logprobs=1))
        driver.run()
        told = driver.told[1]
        assert (told.tokens, told.finishes) == ([], [FinishReason.LENGTH])
        assert told.prompt_logprob_positions == list(range(1, 9))

    @DEPTHS
    def test_a_token_found_to_be_late_is_not_shown(self, depth: int) -> None:
        """At depth 2 a step beyond the end token is in flight already when it is found."""
        tokens, expected = prompt_reaching_eos()
        driver = Driver(Setting(depth=depth))
        driver.add(1, tokens, SamplingParams(max_tokens=100))
        driver.run()
        assert driver.told[1].tokens == expected
        extra = driver.executor.num_tokens - (len(tokens) + len(expected) - 1)
        assert extra == depth - 1

    def test_a_step_may_yield_several_tokens_and_a_stop_among_them_cuts_the_rest(self) -> None:
        driver = Driver(Setting(depth=1))
        driver.add(1, prompt(3), SamplingParams(max_tokens=10, logprobs=0))
        decision = driver.scheduler.schedule()
        assert decision is not None
        plan = driver.scheduler.apply(decision)
        tokens = np.array([[9, EOS, 11]], dtype=np.int32)
        outcome = driver.scheduler.commit(plan, StepResult(plan.step, tokens, np.array([3], dtype=np.int32)))
        assert outcome.token_ids.tolist() == [9, EOS]
        assert outcome.num_tokens.tolist() == [2]
        assert outcome.finished[0][1].reason is FinishReason.STOP
        driver.scheduler.check_invariants()


class TestPrefixCache:
    def test_a_fully_cached_prompt_computes_its_last_token_again(self) -> None:
        """Four full blocks, sent three times, then with one more block."""
        driver = Driver(Setting(block_size=4))
        for number in range(3):
            driver.add(number, prompt(16))
            driver.run()
        longer = driver.add(3, prompt(20))
        driver.run()
        assert driver.told[0].tokens == driver.told[1].tokens == driver.told[2].tokens
        assert longer.num_cached_tokens == 16
        assert driver.scheduler.counters.prefix_cache_hits == 2 * 12 + 16
        assert driver.scheduler.counters.prefix_cache_queries == 3 * 16 + 20

    def test_generated_tokens_are_cached_too(self) -> None:
        driver = Driver(Setting(block_size=4))
        first = driver.add(1, prompt(6), SamplingParams(max_tokens=10, ignore_eos=True))
        driver.run()
        again = driver.add(2, [*prompt(6), *first.saved_output.tolist()])
        driver.run()
        # The last generated token was never an input, so its block is not complete.
        assert again.num_cached_tokens == 12
        assert driver.told[2].tokens == driver.solo(again)

    def test_requests_share_blocks_while_both_run(self) -> None:
        driver = Driver(Setting(block_size=4, depth=1))
        driver.add(1, prompt(16), SamplingParams(max_tokens=8, ignore_eos=True))
        driver.step()
        usage = driver.scheduler.load.kv_usage
        second = driver.add(2, prompt(17), SamplingParams(max_tokens=8, ignore_eos=True))
        driver.step()
        assert second.num_cached_tokens == 16
        assert driver.scheduler.load.kv_usage <= usage + 2 / 64
        driver.run()
        assert driver.told[2].tokens == driver.solo(second)

    @pytest.mark.parametrize(
        ("first", "second", "hits"), [("a", "a", 8), ("a", "b", 0), (None, "a", 0), ("a", None, 0)]
    )
    def test_only_equal_salts_share(self, first: str | None, second: str | None, hits: int) -> None:
        driver = Driver(Setting(block_size=4))
        driver.add(1, prompt(9), cache_salt=first)
        driver.run()
        request = driver.add(2, prompt(9), cache_salt=second)
        driver.run()
        assert request.num_cached_tokens == hits

    @pytest.mark.parametrize(("first", "second"), [("a", "a"), ("a", "b")])
    def test_salts_hold_for_blocks_that_only_generation_filled(self, first: str, second: str) -> None:
        driver = Driver(Setting(block_size=4))
        one = driver.add(1, prompt(2), SamplingParams(max_tokens=8, ignore_eos=True), cache_salt=first)
        driver.run()
        request = driver.add(2, [*prompt(2), *one.saved_output.tolist()], cache_salt=second)
        driver.run()
        assert request.num_cached_tokens == (8 if first == second else 0)

    def test_prompt_logprobs_read_nothing_from_the_cache_but_fill_it(self) -> None:
        driver = Driver(Setting(block_size=4))
        scoring = SamplingParams(max_tokens=1, prompt_logprobs=0)
        for number in (1, 2):
            request = driver.add(number, prompt(12), scoring)
            driver.run()
            assert request.num_cached_tokens == 0
            assert driver.told[number].prompt_logprob_positions == list(range(1, 12))
        assert driver.scheduler.counters.prefix_cache_queries == 0
        plain = driver.add(3, prompt(12))
        driver.run()
        assert plain.num_cached_tokens == 8

    def test_switched_off_nothing_is_found(self) -> None:
        driver = Driver(Setting(block_size=4, caching=False))
        for number in range(2):
            request = driver.add(number, prompt(12))
            driver.run()
        assert request.num_cached_tokens == 0
        assert driver.kv.pool.num_named == 0


class TestAborts:
    @DEPTHS
    @pytest.mark.parametrize("steps", [0, 1, 2, 5])
    def test_blocks_are_free_at_once_and_nothing_more_is_told(self, depth: int, steps: int) -> None:
        driver = Driver(Setting(depth=depth, budget=4))
        request = driver.add(1, prompt(9), SamplingParams(max_tokens=50, ignore_eos=True))
        other = driver.add(2, prompt(9, 20), SamplingParams(max_tokens=20, ignore_eos=True))
        for _ in range(steps):
            driver.step()
        told = list(driver.told[1].tokens)
        assert driver.abort(1) is request
        assert request.state is RequestState.FINISHED
        assert request.finish_reason is FinishReason.ABORT
        driver.run()
        assert driver.told[1].tokens == told
        assert driver.told[1].finishes == []
        assert driver.told[2].tokens == driver.solo(other)
        assert driver.kv.pool.usage == 0.0

    def test_a_slot_is_reused_while_its_old_row_is_in_flight(self) -> None:
        driver = Driver(Setting(depth=2, max_num_seqs=1))
        driver.add(1, prompt(5), SamplingParams(max_tokens=50, ignore_eos=True))
        driver.step()
        driver.abort(1)
        second = driver.add(2, prompt(5, 30), SamplingParams(max_tokens=10, ignore_eos=True))
        driver.run()
        assert driver.told[2].tokens == driver.solo(second)

    def test_an_unknown_or_finished_request_is_no_matter(self) -> None:
        driver = Driver(Setting())
        assert driver.abort(77) is None
        driver.add(1, prompt(3))
        driver.run()
        assert driver.abort(1) is None

    def test_a_preempted_request_can_be_aborted(self) -> None:
        driver = Driver(Setting(num_blocks=8, block_size=4, depth=1))
        requests = [driver.add(n, prompt(4, n * 10), SamplingParams(max_tokens=20, ignore_eos=True)) for n in range(3)]
        while driver.scheduler.counters.num_preemptions == 0:
            driver.step()
        victim = next(request for request in requests if request.state is RequestState.PREEMPTED)
        assert driver.abort(victim.request_id) is victim
        driver.run()
        assert driver.kv.pool.usage == 0.0

    def test_requests_of_a_client_are_found(self) -> None:
        driver = Driver(Setting())
        old, new = make_request_id(3, 255, 5), make_request_id(3, 0, 5)
        for request_id in (1, 2, old, new):
            driver.add(request_id, prompt(3))
        assert driver.scheduler.request_ids_of(0, 0) == [1, 2]
        assert driver.scheduler.request_ids_of(3, 255) == [old]
        assert driver.scheduler.request_ids_of(3, 0) == [new]
        assert driver.scheduler.request_ids_of(0, 1) == []


class TestErrors:
    @DEPTHS
    def test_one_failing_row_ends_its_request_alone(self, depth: int) -> None:
        driver = Driver(Setting(depth=depth))
        driver.executor.poisoned = {1}
        driver.add(1, prompt(5), SamplingParams(max_tokens=20, ignore_eos=True))
        healthy = driver.add(2, prompt(5, 20), SamplingParams(max_tokens=20, ignore_eos=True))
        driver.run()
        assert (driver.told[1].tokens, driver.told[1].finishes) == ([], [FinishReason.ERROR])
        assert driver.told[1].message == "poisoned"
        assert driver.told[2].tokens == driver.solo(healthy)

    @DEPTHS
    def test_a_failing_step_ends_the_requests_in_it_and_no_others(self, depth: int) -> None:
        driver = Driver(Setting(depth=depth, max_num_seqs=2))
        driver.executor.failing_steps = {3}
        for number in (1, 2):
            driver.add(number, prompt(5, number), SamplingParams(max_tokens=20, ignore_eos=True))
        later = driver.add(3, prompt(5, 30), SamplingParams(max_tokens=20, ignore_eos=True))
        driver.run()
        for number in (1, 2):
            assert driver.told[number].finishes == [FinishReason.ERROR]
            assert driver.told[number].message == "the fake device failed"
        assert driver.told[3].tokens == driver.solo(later)
        assert driver.kv.pool.usage == 0.0

    def test_a_row_that_should_have_sampled_and_did_not_is_an_error(self) -> None:
        driver = Driver(Setting(depth=1))
        driver.add(1, prompt(3))
        decision = driver.scheduler.schedule()
        assert decision is not None
        plan = driver.scheduler.apply(decision)
        nothing = StepResult(plan.step, np.full((1, 1), -1, dtype=np.int32), np.zeros(1, dtype=np.int32))
        outcome = driver.scheduler.commit(plan, nothing)
        assert outcome.finished[0][1].reason is FinishReason.ERROR
        assert driver.scheduler.num_unfinished == 0

    def test_results_must_come_in_the_order_of_the_steps(self) -> None:
        driver = Driver(Setting(depth=2))
        driver.add(1, prompt(3), SamplingParams(max_tokens=5))
        plans = []
        for _ in range(2):
            decision = driver.scheduler.schedule()
            assert decision is not None
            plans.append(driver.scheduler.apply(decision))
        result = StepResult(plans[1].step, np.array([[9]], dtype=np.int32), np.ones(1, dtype=np.int32))
        with pytest.raises(ValueError, match="step 2 committed"):
            driver.scheduler.commit(plans[1], result)

    def test_ids_are_unique_and_requests_must_fit(self) -> None:
        driver = Driver(Setting(num_blocks=2, block_size=4))
        request = driver.add(1, prompt(3))
        with pytest.raises(ValueError, match="in use"):
            driver.scheduler.add(request)
        too_long = np.zeros(9, dtype=np.int32)
        with pytest.raises(ValueError, match="may outgrow the pool of 8 tokens"):
            driver.scheduler.add(dataclasses.replace(request, request_id=2, prompt_token_ids=too_long))


def test_logprobs_come_with_their_tokens_through_preemption() -> None:
    driver = Driver(Setting(num_blocks=8, block_size=4))
    sampling = SamplingParams(max_tokens=26, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    requests = [driver.add(number, prompt(5, number * 10), sampling) for number in range(3)]
    driver.run()
    assert driver.scheduler.counters.num_preemptions > 0
    for request in requests:
        told = driver.told[request.request_id]
        assert told.tokens == driver.solo(request)
        assert told.logprob_positions == list(range(5, 5 + len(told.tokens)))
        assert told.prompt_logprob_positions == list(range(1, 5))


@pytest.mark.parametrize("budget", [1, 3, 7, 64])
def test_chunking_and_depth_do_not_change_the_answer(budget: int) -> None:
    expected = None
    for depth in (1, 2, 3):
        driver = Driver(Setting(budget=budget, depth=depth, max_num_seqs=3))
        for number in range(4):
            driver.add(number, prompt(5 + 3 * number, number), SamplingParams(max_tokens=9, ignore_eos=True))
        driver.run()
        tokens = [driver.told[number].tokens for number in range(4)]
        expected = expected or tokens
        assert tokens == expected
