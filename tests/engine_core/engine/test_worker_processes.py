"""An engine core whose workers are processes: it serves as any other, and whoever dies takes all of them along."""

import dataclasses
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.support.engine_process import (
    EngineTalker,
    RunningEngine,
    running_engine,
    started_engine,
    tiny_engine_config,
)
from tests.support.processes import wait_for_ends
from tests.support.server import wait_for
from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.config.parallel import ParallelConfig
from tokenmill_engine.ipc.control import EngineFailed, Ping, Pulse, StartFailed
from tokenmill_engine.ipc.signals import END_SIGNAL
from tokenmill_engine.messages import EngineLoad, SamplingParams

pytestmark = pytest.mark.slow

DEADLINE_S = 60.0
IDLE = EngineLoad(0, 0, 0.0)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8], [200, 201, 202], [9] * 70]


def config(size: int = 2, max_model_len: int = 40_000) -> EngineConfig:
    parallel = ParallelConfig(tensor_parallel_size=size, executor="mp")
    return dataclasses.replace(tiny_engine_config(max_model_len, num_blocks=4096), parallel=parallel)


def workers_of(pid: int) -> list[psutil.Process]:
    """The workers of an engine core, by rank; they may not be configured yet."""
    titles = [(title_of(child), child) for child in psutil.Process(pid).children()]
    return [child for title, child in sorted(titles, key=lambda each: each[0]) if "tokenmill: worker" in title]


def title_of(process: psutil.Process) -> str:
    """Empty for a moment while a process begins."""
    return " ".join(process.cmdline()).strip()


def wait_for_workers(pid: int, pattern: str, count: int = 2) -> list[psutil.Process]:
    wait_for(
        lambda: sum(bool(re.match(pattern, title_of(worker))) for worker in workers_of(pid)) == count,
        DEADLINE_S,
        f"{count} processes called {pattern!r}",
    )
    return workers_of(pid)


@contextmanager
def busy(engine: RunningEngine) -> Iterator[EngineTalker]:
    """A stream under way."""
    talker = EngineTalker(engine.run_dir, 0)
    try:
        request_id = talker.add([5, 6], ENDLESS)
        wait_for(lambda: talker.poll() and talker.answers[request_id].tokens, DEADLINE_S, "tokens", poll_s=0.0)
        yield talker
    finally:
        talker.close()


def test_tokens_titles_and_rest() -> None:
    with running_engine(dataclasses.replace(config(), parallel=ParallelConfig())) as engine:
        talker = EngineTalker(engine.run_dir, 0)
        expected = [answer.tokens for answer in talker.finish(*(talker.add(prompt, GREEDY) for prompt in PROMPTS))]
        talker.close()
    for size in (1, 2):
        with running_engine(config(size)) as engine:
            assert {"launch", "configure", "import", "load", "warmup"} <= set(engine.ready.startup_s)
            assert sum(engine.ready.startup_s.values()) <= engine.started_s
            workers = workers_of(engine.pid)
            assert [title_of(worker) for worker in workers] == [f"tokenmill: worker 0.{rank}" for rank in range(size)]
            talker = EngineTalker(engine.run_dir, 0)
            for _ in range(2):
                ids = [talker.add(prompt, GREEDY) for prompt in PROMPTS]
                assert [answer.tokens for answer in talker.finish(*ids)] == expected
            talker.wait_for_load(IDLE, DEADLINE_S)
            check_idle([psutil.Process(engine.pid), *workers])
            assert engine.stop() == 0
            wait_for_ends(workers)
            assert sorted(os.listdir(engine.run_dir)) == ["engine-0.0.in", "engine-0.0.out", "log", "metrics"]
            assert "Traceback" not in engine.log.read_text()
            talker.close()


def check_idle(processes: list[psutil.Process]) -> None:
    """Nobody computes, once what came before has settled."""

    def cpu_s_in_a_second() -> float:
        before = [process.cpu_times() for process in processes]
        time.sleep(1.0)
        after = [process.cpu_times() for process in processes]
        return sum(b.user + b.system - a.user - a.system for a, b in zip(before, after, strict=True))

    assert min(cpu_s_in_a_second() for _ in range(3)) < 0.03 * len(processes)


def test_sigterm_ends_a_busy_engine_and_its_workers_quietly() -> None:
    with running_engine(config()) as engine, busy(engine):
        workers = workers_of(engine.pid)
        assert engine.stop() == 0
        wait_for_ends(workers)
        assert "Traceback" not in engine.log.read_text()


@pytest.mark.parametrize("is_busy", [True, False])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_is_the_end_of_the_engine_core(victim: int, is_busy: bool) -> None:
    with running_engine(config()) as engine:
        workers = workers_of(engine.pid)
        with busy(engine) if is_busy else nothing():
            workers[victim].kill()
            failure = engine.child.channel.receive()
        while isinstance(failure, Pulse):
            failure = engine.child.channel.receive()
        assert isinstance(failure, EngineFailed)
        assert failure.message.startswith(f"engine core 0 is lost: worker 0.{victim} was killed (SIGKILL)")
        assert engine.child.process.wait(DEADLINE_S) == 1
        wait_for_ends(workers)
        assert re.search(r"CRITICAL .*engine core 0 is lost: worker", engine.log.read_text())


@contextmanager
def nothing() -> Iterator[None]:
    yield


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_killed_engine_core_takes_its_workers_along(is_stopped: bool) -> None:
    """Also one that is stopped, and one in the middle of a step."""
    with running_engine(config()) as engine, busy(engine):
        workers = workers_of(engine.pid)
        if is_stopped:
            workers[1].suspend()
        os.kill(engine.pid, signal.SIGKILL)
        wait_for_ends(workers)


def test_a_stopped_worker_is_a_step_that_takes_long() -> None:
    """The engine core answers, has work, and counts no turn: what the launcher calls stalled."""
    with running_engine(config()) as engine, busy(engine) as talker:
        workers = workers_of(engine.pid)
        workers[1].suspend()
        pulses = [pulse(engine)]

        def stands_still() -> bool:
            pulses.append(pulse(engine))
            return pulses[-1].has_work and pulses[-1].num_turns == pulses[-2].num_turns

        wait_for(stands_still, DEADLINE_S, "an engine core that stands still", poll_s=1.0)
        workers[1].resume()
        wait_for(lambda: pulse(engine).num_turns > pulses[-1].num_turns + 5, DEADLINE_S, "steps")
        assert all(answer.finish is None for answer in talker.answers.values())


def pulse(engine: RunningEngine) -> Pulse:
    engine.child.channel.send(Ping())
    answer = engine.child.channel.receive()
    assert isinstance(answer, Pulse)
    return answer


class TestStart:
    def test_a_model_that_is_not_there_is_one_readable_line(self) -> None:
        broken = dataclasses.replace(config(), model=dataclasses.replace(config().model, path="/nowhere/model"))
        with started_engine(broken) as (child, run_dir, log):
            answer = child.channel.receive()
            assert isinstance(answer, StartFailed)
            assert "/nowhere/model" in answer.message
            assert child.process.wait(timeout=DEADLINE_S) == 1
            assert "Traceback" not in log.read_text()
            assert not [name for name in os.listdir(run_dir) if name.startswith("workers")]

    def test_a_worker_killed_before_it_is_ready_is_named(self) -> None:
        with started_engine(config()) as (child, _, _):
            workers = wait_for_workers(child.process.pid, "tokenmill: worker")
            workers[1].kill()
            answer = child.channel.receive()
            assert isinstance(answer, StartFailed)
            assert answer.message == (
                "worker 0.1 was killed (SIGKILL) while it was starting; if the kernel did so for want of memory, lower "
                "--kv-cache-memory-bytes"
            )
            assert child.process.wait(timeout=DEADLINE_S) == 1
            wait_for_ends(workers)

    @pytest.mark.parametrize("how", [signal.SIGKILL, END_SIGNAL, "close"])
    @pytest.mark.parametrize("title", ["tokenmill: worker ", r"tokenmill: worker 0\.\d"])
    def test_workers_that_load_end_with_their_engine_core(self, title: str, how: signal.Signals | str) -> None:
        """At any moment: when they have just begun, or know what to be."""
        with started_engine(config()) as (child, _, _):
            workers = wait_for_workers(child.process.pid, title)
            if isinstance(how, signal.Signals):
                child.process.send_signal(how)
            else:
                child.channel.close()
            wait_for_ends(workers)
            assert child.process.wait(DEADLINE_S) in (0, 1, -9)
