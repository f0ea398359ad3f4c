"""The engine core as a process, with a tiny model: start, serve, idle, stop, and what it says when it cannot."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.support.engine_process import (
    EngineTalker,
    RunningEngine,
    running_engine,
    started_engine,
    tiny_engine_config,
)
from tests.support.processes import wait_for_end
from tests.support.server import wait_for
from tests.support.tiny_models import VOCAB_SIZE
from tokenmill_engine.block_hash import CacheKey, hash_full_blocks, short_name
from tokenmill_engine.config.engine import SchedulerConfig
from tokenmill_engine.ipc.channel import ChannelClosedError
from tokenmill_engine.ipc.control import Ping, Pulse, StartFailed
from tokenmill_engine.ipc.signals import END_SIGNAL
from tokenmill_engine.messages import AbortRequests, AddRequest, ClientGone, EngineLoad, FinishReason, SamplingParams
from tokenmill_engine.metric_files import render_metrics

pytestmark = pytest.mark.slow

IDLE = EngineLoad(0, 0, 0.0)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
"""As long as the engine allows."""


@pytest.fixture(scope="module")
def engine() -> Iterator[RunningEngine]:
    with running_engine(tiny_engine_config(max_model_len=50_000, num_blocks=4096)) as engine:
        yield engine
        assert engine.stop() == 0


@pytest.fixture
def talkers(engine: RunningEngine) -> Iterator[list[EngineTalker]]:
    talkers = [EngineTalker(engine.run_dir, client) for client in range(2)]
    yield talkers
    for talker in talkers:
        talker.close()


def test_it_says_what_it_can_hold(engine: RunningEngine) -> None:
    ready = engine.ready
    assert (ready.engine, ready.max_model_len, ready.num_gpu_blocks, ready.block_size) == (0, 50_000, 4096, 16)
    assert ready.kv_cache_tokens == 65536
    assert {"launch", "configure", "import", "load", "warmup"} <= set(ready.startup_s)
    assert all(seconds >= 0 for seconds in ready.startup_s.values())
    assert sum(ready.startup_s.values()) <= engine.started_s
    values = render_metrics(os.path.join(engine.run_dir, "metrics")).decode()
    for phase, seconds in ready.startup_s.items():
        labels = f'engine="0",model_name="tiny",phase="{phase}"'
        assert f"tokenmill:startup_seconds{{{labels}}} {seconds}" in values
    assert psutil.Process(engine.pid).cmdline()[0].startswith("tokenmill: engine core 0")


def test_a_start_ends_when_api_servers_are_connected(engine: RunningEngine, talkers: list[EngineTalker]) -> None:
    for talker in talkers:
        while talker.load is None:
            assert talker.poll(timeout_s=30.0)
    values = render_metrics(os.path.join(engine.run_dir, "metrics")).decode()
    (line,) = [line for line in values.splitlines() if 'phase="serve"' in line]
    assert line.startswith("tokenmill:startup_seconds{")
    assert float(line.split()[-1]) > 0


def test_two_clients_get_their_own_answers_and_the_same_tokens_as_alone(talkers: list[EngineTalker]) -> None:
    prompts = [[5, 6, 7, 8], [200, 201, 202]]
    ids = [talker.add(prompt, GREEDY) for talker, prompt in zip(talkers, prompts, strict=True)]
    together = [talker.finish(request_id)[0].tokens for talker, request_id in zip(talkers, ids, strict=True)]
    alone = [talkers[0].finish(talkers[0].add(prompt, GREEDY))[0].tokens for prompt in prompts]
    assert together == alone
    assert [len(tokens) for tokens in together] == [12, 12]


def test_a_bad_request_is_answered_and_disturbs_nobody(talkers: list[EngineTalker]) -> None:
    good = talkers[0].add([5, 6, 7, 8], GREEDY)
    bad = [talkers[1].add(prompt, GREEDY) for prompt in ([], [VOCAB_SIZE], [1] * 50_000)]
    for answer in talkers[1].finish(*bad):
        assert answer.finish is not None
        assert answer.finish.reason is FinishReason.ERROR
        assert answer.finish.message
    assert len(talkers[0].finish(good)[0].tokens) == 12


def test_what_is_no_message_is_dropped(talkers: list[EngineTalker]) -> None:
    for frame in (b"", b"\xff\xff", b"\x93\xa8NoSuch\x01\x02"):
        talkers[0].send_raw(frame)
    assert len(talkers[0].finish(talkers[0].add([5, 6], GREEDY))[0].tokens) == 12


def test_aborted_and_orphaned_requests_leave_an_idle_engine(engine: RunningEngine, talkers: list[EngineTalker]) -> None:
    first = [talkers[0].add([number + 1, 6], ENDLESS) for number in range(3)]
    orphan = talkers[1].add([9, 6], ENDLESS)
    talkers[0].wait_for_tokens(*first)
    talkers[1].wait_for_tokens(orphan)  # or its client might be gone before it has come
    talkers[0].send(AbortRequests(first))
    talkers[0].send(ClientGone(1, 0))
    talkers[0].wait_for_load(IDLE)
    values = render_metrics(os.path.join(engine.run_dir, "metrics")).decode()
    labels = 'engine="0",model_name="tiny"'
    assert f"tokenmill:num_requests_running{{{labels}}} 0.0" in values
    assert f"tokenmill:kv_cache_usage_perc{{{labels}}} 0.0" in values
    aborted = re.search(r'request_success_total\{engine="0",finished_reason="abort",model_name="tiny"\} (\S+)', values)
    assert aborted is not None
    assert float(aborted[1]) >= 4


def test_it_tells_the_launcher_whether_it_gets_on(engine: RunningEngine, talkers: list[EngineTalker]) -> None:
    def pulse() -> Pulse:
        engine.child.channel.send(Ping())
        answer = engine.child.channel.receive()
        assert isinstance(answer, Pulse)
        return answer

    # No load is reported as soon as no request is left; a step of those that were may still be in flight.
    talkers[0].wait_for_load(IDLE)
    wait_for(lambda: not pulse().has_work, 30, "an engine core without work")
    request_id = talkers[0].add([5, 6], ENDLESS)
    talkers[0].wait_for_tokens(request_id)
    before = pulse()
    assert before.has_work
    wait_for(lambda: pulse().num_turns >= before.num_turns + 5, 30, "five turns", poll_s=0.0)
    talkers[0].send(AbortRequests([request_id]))
    talkers[0].wait_for_load(IDLE)
    wait_for(lambda: not pulse().has_work, 30, "an engine core without work")


def test_requests_of_a_client_that_vanished_without_a_word_are_aborted(
    engine: RunningEngine, talkers: list[EngineTalker]
) -> None:
    vanishing = EngineTalker(engine.run_dir, 7)
    request_id = vanishing.add([5, 6], ENDLESS)
    vanishing.wait_for_tokens(request_id)
    while talkers[0].load in (None, IDLE):
        assert talkers[0].poll(30)
    vanishing.close()
    talkers[0].wait_for_load(IDLE)
    assert "API server 7 is not connected" in engine.log.read_text()


def test_an_idle_engine_costs_nothing(engine: RunningEngine, talkers: list[EngineTalker]) -> None:
    """Once what came before has settled; a busy loop costs a second of CPU every second, for ever."""
    talkers[0].wait_for_load(IDLE)
    process = psutil.Process(engine.pid)

    def cpu_s_in_a_second() -> float:
        before = process.cpu_times()
        time.sleep(1.0)
        after = process.cpu_times()
        return after.user + after.system - before.user - before.system

    wait_for(lambda: cpu_s_in_a_second() < 0.03, 30, "second without work", poll_s=0.0)


def test_throughput_is_logged_with_the_engines_number(engine: RunningEngine, talkers: list[EngineTalker]) -> None:
    talkers[0].finish(talkers[0].add([5, 6, 7], GREEDY))
    pattern = r"INFO .*\[engine core 0\].* Engine 000: prompt throughput [1-9]\S* tokens/s, generation throughput"
    wait_for(lambda: re.search(pattern, engine.log.read_text()), 30, "line with the throughput")


def test_sigterm_ends_a_busy_engine_quietly() -> None:
    """And does not wait for the end of what it is busy with, which would come soon enough."""
    with running_engine(tiny_engine_config(max_model_len=50_000, num_blocks=4096)) as engine:
        talker = EngineTalker(engine.run_dir, 0)
        request_id = talker.add([5, 6], ENDLESS)
        talker.wait_for_tokens(request_id)
        assert engine.stop() == 0
        while talker.poll():
            pass
        assert talker.answers[request_id].finish is None
        talker.close()
        assert "Traceback" not in engine.log.read_text()


def test_a_failing_loop_is_the_end_of_the_process() -> None:
    """A request that no API server of ours would send: half of a token is missing."""
    with running_engine(tiny_engine_config()) as engine:
        talker = EngineTalker(engine.run_dir, 0)
        talker.send(AddRequest(1, "half", b"\x05\x00", GREEDY, time.monotonic()))
        assert engine.child.process.wait(timeout=60) == 1
        talker.close()
        log = engine.log.read_text()
        assert "Traceback" in log
        assert re.search(r"CRITICAL .*engine core 0 is lost: .*multiple of element size", log)


def test_with_several_ranks_clients_know_which_blocks_there_are() -> None:
    config = dataclasses.replace(tiny_engine_config(num_blocks=8), data_parallel_size=2)
    prompts = [[number + 3] * 50 for number in range(3)]
    short = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    with running_engine(config) as engine:
        first = EngineTalker(engine.run_dir, 0)
        for prompt in prompts:
            first.finish(first.add(prompt, short))
        second = EngineTalker(engine.run_dir, 1)
        hashes = [hash_full_blocks(np.array(prompt, dtype=np.int32), 16, CacheKey()) for prompt in prompts]
        # Each took four blocks of eight and left three with names; the first one's went, their end before the others.
        left = {short_name(each) for each in (*hashes[0][:1], *hashes[1], *hashes[2])}
        deadline = time.monotonic() + 60
        while not first.blocks == second.blocks == left:
            assert time.monotonic() < deadline, (first.blocks, second.blocks, left)
            first.poll()
            second.poll()
        for talker in (first, second):
            talker.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_forced_preemption_changes_nothing(asynchronous: bool) -> None:
    prompts = [[10 * number + 1, 6, 7] for number in range(6)]
    # Eight blocks each: any two that run at the same time need more than there are.
    sampling = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    scheduler = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=32, async_scheduling=asynchronous)
    with running_engine(tiny_engine_config(max_model_len=128, num_blocks=12, scheduler=scheduler)) as engine:
        talker = EngineTalker(engine.run_dir, 0)
        together = [answer.tokens for answer in talker.finish(*(talker.add(prompt, sampling) for prompt in prompts))]
        log = engine.log.read_text()
        counts = re.findall(r"total_cumulative_preemption_cnt=(\d+)", log)
        assert counts == [str(number) for number in range(1, len(counts) + 1)]
        assert counts
        metrics = render_metrics(os.path.join(engine.run_dir, "metrics")).decode()
        assert f'num_preemptions_total{{engine="0",model_name="tiny"}} {len(counts)}.0' in metrics
        alone = [talker.finish(talker.add(prompt, sampling))[0].tokens for prompt in prompts]
        talker.wait_for_load(IDLE)
        talker.close()
    assert together == alone


def test_a_latency_target_changes_when_prompts_are_computed_and_not_what_comes_out() -> None:
    prompts = [[5, 6, 7], [number % 50 + 3 for number in range(300)]]
    sampling = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    answers, budgets, logs = [], [], []
    for target_itl_ms in (None, 0.001):
        scheduler = SchedulerConfig(4, 512, explicit_budget=target_itl_ms is None, target_itl_ms=target_itl_ms)
        with running_engine(tiny_engine_config(max_model_len=50_000, num_blocks=4096, scheduler=scheduler)) as engine:
            talker = EngineTalker(engine.run_dir, 0)
            streaming = talker.add(prompts[0], ENDLESS)
            talker.wait_for_tokens(streaming)
            (answer,) = talker.finish(talker.add(prompts[1], sampling))
            talker.wait_for_tokens(streaming, count=150)
            answers.append([talker.answers[streaming].tokens[:150], answer.tokens])
            talker.send(AbortRequests([streaming]))
            talker.wait_for_load(IDLE)
            # A last step may be in flight when no request is left.
            wait_for(lambda engine=engine: _steps_timed(engine) == _steps_counted(engine), 30, "count of each step")
            budgets.append(re.findall(r"tokenmill:mixed_step_token_budget{.*} (\S+)", _metrics(engine)))
            logs.append(engine.log.read_text())
            talker.close()
    assert answers[0] == answers[1]
    assert budgets == [["512.0"], ["33.0"]]
    assert "token budget: 512 tokens in every step" in logs[0]
    assert "token budget: at most 512 tokens in a step; beside running streams as many as keep the step" in logs[1]
    assert [log.count("--target-itl-ms 0.001 cannot be kept") for log in logs] == [0, 1]


def _metrics(engine: RunningEngine) -> str:
    return render_metrics(os.path.join(engine.run_dir, "metrics")).decode()


def _steps_timed(engine: RunningEngine) -> float:
    return float(re.findall(r"tokenmill:step_time_seconds_count{.*} (\S+)", _metrics(engine))[0])


def _steps_counted(engine: RunningEngine) -> float:
    return float(re.findall(r"tokenmill:iteration_tokens_total_count{.*} (\S+)", _metrics(engine))[0])


PARENT = """
import sys, time
from tokenmill_engine.ipc.child import spawn_child
from tokenmill_engine.ipc.control import FromEngine
child = spawn_child("tokenmill_engine.process", FromEngine, args=["--run-dir", sys.argv[1]])
print(child.process.pid, flush=True)
sys.stdin.readline()
child.channel.close()
child.process.wait()
"""
"""A launcher that never says what the engine core is to be."""


class TestStart:
    def test_a_model_that_is_not_there_is_one_readable_line(self) -> None:
        config = tiny_engine_config()
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, path="/nowhere/model"))
        with started_engine(config) as (child, _, _):
            answer = child.channel.receive()
            assert isinstance(answer, StartFailed)
            assert "/nowhere/model" in answer.message
            assert "\n" not in answer.message
            assert child.process.wait(timeout=60) == 1

    def test_a_pool_too_small_for_the_length_asked_for_names_what_fits(self) -> None:
        config = tiny_engine_config(max_model_len=256, num_blocks=4)
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, max_model_len_explicit=True))
        with started_engine(config) as (child, _, _):
            answer = child.channel.receive()
            assert isinstance(answer, StartFailed)
            assert "256" in answer.message
            assert "64" in answer.message

    def test_a_run_directory_that_vanishes_is_one_readable_line(self) -> None:
        with started_engine(tiny_engine_config()) as (child, run_dir, log), log.open() as stream:
            wait_for(lambda: os.path.exists(os.path.join(run_dir, "engine-0.0.out")), 60, "a socket", poll_s=0.002)
            shutil.rmtree(run_dir)
            answer = child.channel.receive()
            assert isinstance(answer, StartFailed)
            assert answer.message == f"engine core 0 cannot start: the folder {run_dir} was removed"
            assert child.process.wait(timeout=60) == 1
            assert "Traceback" not in stream.read()

    @pytest.mark.parametrize("wait_s", [0.0, 0.03, 0.1])
    def test_a_launcher_that_goes_while_it_loads_ends_it_without_a_traceback(self, wait_s: float) -> None:
        """Whichever thread notices first: the one that listens, or the one that tells how the start went."""
        with started_engine(tiny_engine_config()) as (child, run_dir, log), log.open() as stream:
            wait_for(lambda: os.path.exists(os.path.join(run_dir, "engine-0.0.out")), 60, "a socket", poll_s=0.002)
            time.sleep(wait_s)
            child.channel.close()
            assert child.process.wait(timeout=60) == 1
            assert "Traceback" not in stream.read()
            assert not os.path.exists(run_dir)

    def test_the_end_signal_while_loading_ends_it(self) -> None:
        with started_engine(tiny_engine_config()) as (child, _, _):
            process = psutil.Process(child.process.pid)
            wait_for(lambda: "engine core 0" in " ".join(process.cmdline()), 60, "a title", poll_s=0.005)
            child.process.send_signal(END_SIGNAL)
            assert child.process.wait(timeout=60) == 0
            with pytest.raises(ChannelClosedError):
                child.channel.receive()

    def test_before_it_is_configured_it_ends_with_the_launcher_and_removes_its_folder(self, tmp_path: Path) -> None:
        """However the launcher ends: it was killed, or the configuration turned out to be wrong."""
        for how in ("process.kill()", "child.channel.close()"):
            run_dir = tmp_path / "run"
            run_dir.mkdir()
            with subprocess.Popen(
                [sys.executable, "-c", PARENT, str(run_dir)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
            ) as parent:
                assert parent.stdout is not None
                child = psutil.Process(int(parent.stdout.readline()))
                if how == "process.kill()":
                    parent.kill()
                else:
                    parent.communicate("close\n")
                wait_for_end(child)
            assert not run_dir.exists()

    def test_libraries_that_cannot_be_imported_are_one_readable_line(self, tmp_path: Path) -> None:
        (tmp_path / "torch.py").write_text("raise ImportError('libsomething.so.1: cannot open shared object file')")
        with started_engine(tiny_engine_config(), PYTHONPATH=str(tmp_path)) as (child, _, _):
            answer = child.channel.receive()
            assert isinstance(answer, StartFailed)
            assert answer.message == (
                "engine core 0 cannot start: ImportError: libsomething.so.1: cannot open shared object file"
            )

    def test_it_ends_when_the_launcher_closes_the_channel(self) -> None:
        with running_engine(tiny_engine_config()) as engine:
            engine.child.channel.close()
            assert engine.child.process.wait(timeout=60) == 1
            assert not os.path.exists(engine.run_dir)
