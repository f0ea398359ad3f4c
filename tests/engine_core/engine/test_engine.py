"""The engine core over the fake executor: messages in, messages out, for several API servers."""

import logging
import math

import numpy as np
import pytest

from tests.support.engine_bench import Bench
from tests.support.fake_executor import VOCAB_SIZE, FakeExecutor, solo_run
from tokenmill_engine.block_hash import CacheKey, hash_full_blocks, pack_short_names, short_name
from tokenmill_engine.errors import EngineDeadError
from tokenmill_engine.ipc.ids import make_request_id
from tokenmill_engine.messages import (
    AbortRequests,
    BlockEvents,
    ClientGone,
    EngineLoad,
    FinishReason,
    Hello,
    LoadReport,
    SamplingParams,
    StepOutput,
)
from tokenmill_engine.outputs import StepPlan, StepResult

IDLE = EngineLoad(0, 0, 0.0)
LONG = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize("depth", [1, 2])
def test_clients_get_their_own_answers(depth: int) -> None:
    bench = Bench(depth=depth)
    prompts = {client: [client + 1, 9, 20] for client in range(3)}
    ids = {client: bench.add(client, prompt, LONG) for client, prompt in prompts.items()}
    bench.run()
    for client, request_id in ids.items():
        assert bench.tokens[request_id] == solo_run(prompts[client], LONG, 200)[0]
        assert [finish.reason for finish in bench.finishes[request_id]] == [FinishReason.LENGTH]
        assert bench.cached[request_id] == 0


def test_cached_tokens_come_with_the_first_output() -> None:
    bench = Bench()
    bench.add(0, list(range(20, 33)), LONG)
    bench.run()
    second = bench.add(0, list(range(20, 33)), LONG)
    bench.run()
    assert bench.cached[second] == 12


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        ([], SamplingParams()),
        ([VOCAB_SIZE], SamplingParams()),
        ([1], SamplingParams(temperature=math.nan)),
        ([1] * 300, SamplingParams()),
    ],
)
def test_a_request_that_cannot_be_done_is_answered_at_once_and_alone(
    prompt: list[int], sampling: SamplingParams
) -> None:
    bench = Bench()
    good = bench.add(0, [1, 2, 3], LONG)
    bench.step()
    bad = bench.add(1, prompt, sampling)
    bench.step()
    assert [(finish.reason, bool(finish.message)) for finish in bench.finishes[bad]] == [(FinishReason.ERROR, True)]
    bench.run()
    assert bench.tokens[good] == solo_run([1, 2, 3], LONG, 200)[0]


def test_a_prompt_that_the_pool_cannot_hold_is_refused_though_the_model_could() -> None:
    """Nobody behind it has to wait."""
    bench = Bench(num_blocks=8)
    too_big = bench.add(0, [1] * 40, SamplingParams(max_tokens=4))
    small = bench.add(0, [1, 2], SamplingParams(max_tokens=4, ignore_eos=True))
    bench.run()
    assert bench.finishes[too_big][0].reason is FinishReason.ERROR
    assert "32" in (bench.finishes[too_big][0].message or "")
    assert len(bench.tokens[small]) == 4


def test_a_second_request_of_the_same_id_does_not_disturb_the_first(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    request_id = bench.add(0, [1, 2, 3], LONG)
    bench.step()
    with caplog.at_level(logging.ERROR):
        bench.add(0, [4, 5], LONG, request_id)
    bench.run()
    assert bench.tokens[request_id] == solo_run([1, 2, 3], LONG, 200)[0]
    assert "in use" in caplog.text


class TestLoad:
    def test_a_client_that_says_hello_is_told_the_load_at_once(self) -> None:
        bench = Bench()
        bench.core.handle(Hello(4))
        bench.step()
        assert bench.reports[4] == [IDLE]
        assert bench.step() == []

    def test_idle_clients_hear_of_changes_caused_by_others(self) -> None:
        bench = Bench(max_num_seqs=1)
        for client in (0, 1):
            bench.core.handle(Hello(client))
        bench.step()
        ids = [bench.add(0, [5, 6], LONG) for _ in range(3)]
        bench.step()
        assert (bench.load[1].num_running, bench.load[1].num_waiting) == (1, 2)
        bench.run()
        assert bench.load[0] == bench.load[1] == IDLE
        assert all(len(bench.tokens[request_id]) == 40 for request_id in ids)
        assert 2 < len(bench.reports[1]) < 60

    def test_after_the_last_abort_everybody_sees_zero_without_a_step(self) -> None:
        """Twenty streams are closed at once and nothing is sent afterwards."""
        bench = Bench()
        for client in (0, 1):
            bench.core.handle(Hello(client))
        ids = [bench.add(0, [number + 1, 6], LONG) for number in range(20)]
        for _ in range(3):
            bench.step()
        bench.core.handle(AbortRequests(ids))
        steps = bench.executor.num_steps
        bench.step()
        assert bench.load[0] == bench.load[1] == IDLE
        bench.run()
        assert bench.executor.num_steps <= steps + 1
        assert not any(bench.finishes.values())

    def test_a_client_that_is_gone_frees_its_requests_and_hears_no_more(self) -> None:
        bench = Bench()
        for client in (0, 1):
            bench.core.handle(Hello(client))
        bench.add(0, [5, 6], LONG)
        kept = bench.add(1, [7, 8], LONG)
        bench.step()
        bench.core.handle(ClientGone(0, 0))
        bench.reports.clear()
        bench.step()
        assert bench.core.scheduler.load.num_running == 1
        bench.run()
        assert bench.reports[0] == []
        assert bench.tokens[kept] == solo_run([7, 8], LONG, 200)[0]

    def test_a_client_that_greets_again_has_given_up_what_it_had(self) -> None:
        """Its connection was lost, and answers with it."""
        bench = Bench()
        for client in (0, 1):
            bench.core.handle(Hello(client))
        lost = bench.add(0, [5, 6], LONG)
        kept = bench.add(1, [7, 8], LONG)
        bench.step()
        bench.core.handle(Hello(0))
        bench.tokens.clear()
        bench.reports.clear()
        bench.step()
        assert bench.core.scheduler.load.num_running == len(bench.reports[0]) == 1
        bench.run()
        assert lost not in bench.tokens
        assert kept in bench.tokens

    def test_the_end_of_a_predecessor_does_not_touch_its_successor(self) -> None:
        """The launcher's word may come after the greeting and the requests of the process it started next."""
        bench = Bench()
        bench.core.handle(Hello(0, 0))
        bench.add(0, [5, 6], LONG)
        bench.step()
        bench.core.handle(Hello(0, 1))
        kept = bench.add(0, [7, 8], LONG, make_request_id(0, 1, 1))
        bench.core.handle(ClientGone(0, 0))
        bench.step()
        assert bench.core.scheduler.load.num_running == 1
        bench.run()
        assert bench.tokens[kept] == solo_run([7, 8], LONG, 200)[0]
        bench.reports.clear()
        bench.add(1, [7, 8], LONG)
        bench.run()
        assert bench.reports[0]


class TestSeveralEngines:
    """What an engine tells beyond its load where API servers choose among several."""

    def test_a_greeting_is_answered_with_load_and_blocks_and_changes_follow_the_outputs(self) -> None:
        bench = Bench(num_engines=2)
        bench.add(0, list(range(20, 33)), SamplingParams(max_tokens=1, ignore_eos=True))
        bench.run()
        assert bench.block_events == []
        bench.core.handle(Hello(1, 6))
        answer = [message for _, message in bench.step()]
        names = pack_short_names(hash_full_blocks(np.arange(20, 32, dtype=np.int32), 4, CacheKey()))
        load = EngineLoad(num_received=0)
        assert answer == [LoadReport(3, load, 6), BlockEvents(3, names, b"", 6, is_snapshot=True)]
        prompt = list(range(40, 45))
        bench.add(1, prompt, SamplingParams(max_tokens=1, ignore_eos=True), make_request_id(1, 6, 1))
        outputs = [message for _, message in bench.step()]
        stored = pack_short_names(hash_full_blocks(np.arange(40, 44, dtype=np.int32), 4, CacheKey()))
        assert isinstance(outputs[0], StepOutput)
        assert outputs[0].load.num_received == 1
        assert outputs[1:] == [BlockEvents(3, stored, b"", 6)]

    def test_evicted_blocks_are_told(self) -> None:
        bench = Bench(num_blocks=5, num_engines=2)
        bench.core.handle(Hello(0))
        for first in (10, 30):
            bench.add(0, list(range(first, first + 13)), SamplingParams(max_tokens=1, ignore_eos=True))
            bench.run()
        known: set[int] = set()
        for _, events in bench.block_events:
            known -= set(np.frombuffer(events.removed, "<u8").tolist())
            known |= set(np.frombuffer(events.stored, "<u8").tolist())
        hashes = [hash_full_blocks(np.arange(first, first + 12, dtype=np.int32), 4, CacheKey()) for first in (10, 30)]
        # Of the first prompt the beginning is still there: its end went first.
        assert known == {short_name(each) for each in (hashes[0][0], *hashes[1])}

    def test_queued_prefill_is_part_of_the_load(self) -> None:
        bench = Bench(num_engines=2, max_num_seqs=1)
        for client in (0, 1):
            bench.core.handle(Hello(client))
        for number in range(2):
            bench.add(0, [number + 1] * 100, SamplingParams(max_tokens=2, ignore_eos=True))
        bench.step()
        # Two steps of 64 tokens are on their way, so the first prompt is done; the second waits.
        assert bench.load == {0: EngineLoad(1, 1, 25 / 64, 100, 2), 1: EngineLoad(1, 1, 25 / 64, 100, 0)}
        bad = bench.add(1, [], LONG)
        bench.run()
        assert bench.finishes[bad]
        assert bench.load == {0: EngineLoad(num_received=2), 1: EngineLoad(num_received=1)}

    @pytest.mark.parametrize(("num_engines", "caching"), [(1, True), (2, False)])
    def test_nothing_is_told_of_blocks_where_nobody_asks_for_them(self, num_engines: int, caching: bool) -> None:
        bench = Bench(num_engines=num_engines, caching=caching)
        bench.core.handle(Hello(0))
        for _ in range(2):
            bench.add(0, list(range(20, 33)), LONG)
            bench.run()
        assert bench.block_events == []

    def test_a_lone_engine_does_not_count_what_nobody_compares(self) -> None:
        bench = Bench(max_num_seqs=1)
        for number in range(2):
            bench.add(0, [number + 1] * 50, LONG)
        bench.step()
        assert bench.load[0] == EngineLoad(1, 1, 13 / 64)


class TestFailures:
    @pytest.mark.parametrize("depth", [1, 2])
    def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(self, depth: int) -> None:
        bench = Bench(depth=depth)
        bench.executor.failing_steps = {2}
        first = bench.add(0, [1, 2, 3], LONG)
        bench.run()
        assert [(f.reason, f.message) for f in bench.finishes[first]] == [
            (FinishReason.ERROR, "the fake device failed")
        ]
        second = bench.add(0, [1, 2, 3], LONG)
        bench.run()
        assert bench.tokens[second] == solo_run([1, 2, 3], LONG, 200)[0]

    def test_a_lost_device_is_the_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bench = Bench()

        def lose(executor: FakeExecutor, plan: StepPlan) -> StepResult:
            raise EngineDeadError("the device is lost")

        monkeypatch.setattr(FakeExecutor, "run_until", lose)
        bench.add(0, [1, 2, 3], LONG)
        with pytest.raises(EngineDeadError):
            bench.core.step()

    @pytest.mark.parametrize("depth", [1, 2])
    def test_with_asynchronous_scheduling_a_step_is_planned_while_one_runs(self, depth: int) -> None:
        bench = Bench(depth=depth)
        bench.add(0, [1, 2, 3], SamplingParams(max_tokens=6, ignore_eos=True))
        bench.run()
        # The last step is alone in both cases.
        assert bench.executor.queue_lengths == [depth] * 5 + [1]
