"""Workers in processes of their own: the same steps as in this process, and what becomes of faults of all kinds."""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.engine_core.executor.test_uniproc import broken_plan, run
from tests.engine_core.worker.conftest import BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS, tiny_engine_config
from tests.support.server import wait_for
from tests.support.step_driver import Generation, StepDriver
from tokenmill_engine.config.engine import CacheConfig, EngineConfig
from tokenmill_engine.config.parallel import ParallelConfig
from tokenmill_engine.errors import EngineDeadError, EngineError, StartupError
from tokenmill_engine.executor import worker_pool
from tokenmill_engine.executor.multiproc import MultiprocExecutor
from tokenmill_engine.executor.uniproc import UniprocExecutor
from tokenmill_engine.executor.worker_pool import WorkerPool
from tokenmill_engine.ipc import stopped
from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.outputs import StepHandle, StepPlan
from tokenmill_engine.worker.rehearsal import GREEDY, rehearsal_plan

pytestmark = pytest.mark.slow

DEADLINE_S = 60.0
RANKS = [0, 1]

FEW_FILES = """
import os, psutil, resource
from tokenmill_engine.errors import StartupError
from tokenmill_engine.executor.worker_pool import WorkerPool
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
before = os.listdir("/proc/self/fd")
for spare in range(2, 26):
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) + spare, hard))
    try:
        WorkerPool(3).stop()
        print("started with", spare)
    except StartupError as error:
        assert str(error) == "3 workers cannot be started: too many open files: raise `ulimit -n`", error
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    assert os.listdir("/proc/self/fd") == before
    assert not psutil.Process().children()
"""


class Running:
    """An executor, its workers' processes, and what it was told of their loss."""

    def __init__(self, folder: Path, size: int, **changes: object) -> None:
        self.config: EngineConfig = dataclasses.replace(
            tiny_engine_config(**changes),  # type: ignore[arg-type]
            parallel=ParallelConfig(tensor_parallel_size=size, executor="mp"),
        )
        self.pool = WorkerPool(size)
        self.processes = [psutil.Process(child.process.pid) for child in self.pool._children]
        self.losses: list[str] = []
        self.lost = threading.Event()
        self.executor = MultiprocExecutor(self.config, self.pool, 3, str(folder / "store"), self._on_lost)

    def _on_lost(self, error: EngineDeadError) -> None:
        self.losses.append(error.message)
        self.lost.set()

    def submit(self, plan: StepPlan | None = None) -> StepHandle:
        return self.executor.submit(plan or rehearsal_plan(1, 64, 1, BLOCK_SIZE, GREEDY))

    def check_gone(self) -> None:
        assert psutil.wait_procs(self.processes, timeout=DEADLINE_S)[1] == []


@contextlib.contextmanager
def running(folder: Path, size: int, **changes: object) -> Iterator[Running]:
    """Ready workers."""
    run = Running(folder, size, **changes)
    try:
        run.executor.initialize()
        yield run
    finally:
        run.executor.shutdown()
        run.check_gone()
        assert list(folder.iterdir()) == []


def first_token(workers: Running) -> list[list[int]]:
    return workers.submit().result().token_ids.tolist()


def uniproc_tokens() -> list[list[int]]:
    executor = UniprocExecutor(tiny_engine_config())
    executor.initialize()
    try:
        return run(executor, depth=1)
    finally:
        executor.shutdown()


class TestSteps:
    @pytest.mark.parametrize("size", [1, 2])
    def test_tokens_are_those_of_a_worker_in_this_process(self, size: int, tmp_path: Path) -> None:
        expected = uniproc_tokens()
        with running(tmp_path, size) as workers:
            for depth in (1, 2, 4):
                assert run(workers.executor, depth=depth) == expected

    @pytest.mark.parametrize("size", [1, 2])
    def test_a_step_that_fails_everywhere_harms_no_other(self, size: int, tmp_path: Path) -> None:
        with running(tmp_path, size) as workers:
            before = run(workers.executor, depth=2)
            first, bad, last = (workers.submit(plan) for plan in (None, broken_plan(7), None))
            assert first.result().num_new.tolist() == [1]
            with pytest.raises(EngineError, match=r"^step 7 failed: IndexError") as failure:
                bad.result()
            assert not isinstance(failure.value, EngineDeadError)
            assert last.result().token_ids.tolist() == first_token(workers)
            assert run(workers.executor, depth=2) == before
            assert workers.losses == []

    def test_plans_and_answers_may_be_longer_than_their_rings(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Neither side waits for the other for ever, though both have to wait for space at times."""
        monkeypatch.setattr(worker_pool, "_PLANS_BYTES", 256)
        monkeypatch.setattr(worker_pool, "_ANSWERS_BYTES", 256)
        with running(tmp_path, 2) as workers:
            generations = [
                Generation(list(range(3, 3 + length)), 8, SamplingParams(temperature=0.0, seed=0, prompt_logprobs=20))
                for length in (70, 200, 90)
            ]
            driver = StepDriver(
                workers.submit, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_slots=NUM_SLOTS, budget=128, depth=4
            )
            driver.run(generations)
            for generation in generations:
                assert len(generation.output) == 8
                scores = [len(rows.token_ids) for rows in generation.prompt_logprobs]
                assert sum(scores) == len(generation.prompt) - 1

    def test_shutdown_finishes_what_was_submitted_and_may_be_repeated(self, tmp_path: Path) -> None:
        with running(tmp_path, 2) as workers:
            handles = [workers.submit() for _ in range(4)]
            workers.executor.shutdown()
            assert [handle.result().num_new.tolist() for handle in handles] == [[1]] * 4
            workers.executor.shutdown()
            assert workers.losses == []
            with pytest.raises(EngineDeadError, match="ended"):
                workers.submit().result()

    def test_signals_to_all_processes_of_a_server_are_not_the_workers_to_answer(self, tmp_path: Path) -> None:
        with running(tmp_path, 2) as workers:
            for process in workers.processes:
                for number in (signal.SIGINT, signal.SIGTERM):
                    process.send_signal(number)
            assert workers.submit().result().num_new.tolist() == [1]

    def test_a_stopped_worker_only_delays(self, tmp_path: Path) -> None:
        with running(tmp_path, 2) as workers:
            workers.processes[1].suspend()
            handle = workers.submit()
            done = threading.Event()
            waiting = threading.Thread(target=lambda: (handle.result(), done.set()))
            waiting.start()
            assert not done.wait(0.5)
            workers.processes[1].resume()
            assert done.wait(DEADLINE_S)
            waiting.join()


class TestStart:
    @pytest.mark.parametrize("size", [1, 2])
    def test_what_the_machine_cannot_give_is_told_as_it_is(self, size: int, tmp_path: Path) -> None:
        changes = {"cache": CacheConfig(num_gpu_blocks_override=2), "max_model_len_explicit": True}
        with (
            pytest.raises(
                StartupError, match=r"^--max-model-len 512 needs .* largest --max-model-len that fits is 32$"
            ),
            running(tmp_path, size, **changes),
        ):
            pass

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("0 start refuse", "^rank 0 has not enough of everything; use --less$"),
            ("1 start refuse", "^rank 1 has not enough of everything; use --less$"),
            ("all start refuse", "^rank [01] has not enough of everything; use --less$"),
            ("1 start raise", "^worker 3.1 cannot start: ValueError: a fault$"),
            ("1 start exit", "^worker 3.1 exited with status 7 while it was starting$"),
            ("0 import exit", "^worker 3.0 exited with status 7 while it was starting$"),
        ],
    )
    def test_the_worker_that_failed_first_says_why(
        self, text: str, message: str, fault: Callable[[str], Path], tmp_path: Path
    ) -> None:
        fault(text)
        with pytest.raises(StartupError, match=message), running(tmp_path, 2):
            pass

    @pytest.mark.parametrize("victim", RANKS)
    def test_a_worker_killed_before_it_is_configured(self, victim: int, tmp_path: Path) -> None:
        run = Running(tmp_path, 2)
        run.processes[victim].kill()
        with pytest.raises(
            StartupError, match=rf"^worker 3.{victim} was killed \(SIGKILL\) while it was starting; .*$"
        ):
            run.executor.initialize()
        run.executor.shutdown()
        run.check_gone()

    @pytest.mark.parametrize(("hanging", "victim"), [(0, 0), (1, 1), (1, 0)])
    def test_a_worker_killed_while_it_starts(
        self, hanging: int, victim: int, fault: Callable[[str], Path], tmp_path: Path
    ) -> None:
        notes = fault(f"{hanging} start hang")
        run = Running(tmp_path, 2)
        failures: list[str] = []

        def start() -> None:
            try:
                run.executor.initialize()
            except StartupError as error:
                failures.append(error.message)

        starting = threading.Thread(target=start)
        starting.start()
        wait_for(lambda: notes.read_text() != "", DEADLINE_S, "a worker that hangs")
        run.processes[victim].kill()
        starting.join(DEADLINE_S)
        run.executor.shutdown()
        run.check_gone()
        assert len(failures) == 1
        assert failures[0].startswith(f"worker 3.{victim} was killed (SIGKILL)")

    def test_a_machine_that_does_not_allow_so_many_files(self) -> None:
        """At whichever of them it ends, nothing is left."""
        done = subprocess.run([sys.executable, "-c", FEW_FILES], check=True, stdout=subprocess.PIPE, text=True)
        assert done.stdout == ""

    def test_the_engine_core_needs_no_torch(self) -> None:
        script = (
            "import sys, tokenmill_engine.process, tokenmill_engine.executor.multiproc\n"
            "sys.exit('torch' in sys.modules)"
        )
        subprocess.run([sys.executable, "-c", script], check=True)

    def test_nothing_is_left_of_earlier_workers(self, tmp_path: Path) -> None:
        def traces() -> tuple[int, int, int]:
            return len(os.listdir("/proc/self/fd")), threading.active_count(), len(psutil.Process().children())

        with running(tmp_path, 2):
            pass
        before = traces()
        for number in range(3):
            with running(tmp_path, 2) as workers:
                if number == 1:
                    workers.processes[0].kill()
                    assert workers.lost.wait(DEADLINE_S)
        assert traces() == before


class TestDeaths:
    @pytest.mark.parametrize(("size", "victim"), [(1, 0), (2, 0), (2, 1)])
    def test_an_idle_worker_is_killed(self, size: int, victim: int, tmp_path: Path) -> None:
        with running(tmp_path, size) as workers:
            workers.submit().result()
            workers.processes[victim].kill()
            assert workers.lost.wait(DEADLINE_S)
            assert len(workers.losses) == 1
            assert workers.losses[0].startswith(f"worker 3.{victim} was killed (SIGKILL)")
            for _ in range(2):
                with pytest.raises(EngineDeadError, match=rf"^worker 3.{victim} was killed"):
                    workers.submit().result()

    @pytest.mark.parametrize(("size", "hanging", "victim"), [(1, 0, 0), (2, 0, 0), (2, 0, 1), (2, 1, 0), (2, 1, 1)])
    def test_a_worker_is_killed_in_a_step(
        self, size: int, hanging: int, victim: int, fault: Callable[[str], Path], tmp_path: Path
    ) -> None:
        """In its own work, or while it waits for another that hangs."""
        notes = fault(f"{hanging} 1 hang")
        with running(tmp_path, size) as workers:
            handles = [workers.submit() for _ in range(3)]
            assert handles[0].result().num_new.tolist() == [1]
            wait_for(lambda: notes.read_text() != "", DEADLINE_S, "a worker that hangs")
            workers.processes[victim].kill()
            for handle in handles[1:]:
                with pytest.raises(EngineDeadError, match=rf"^worker 3.{victim} was killed"):
                    handle.result()

    def test_a_worker_whose_connection_ends_says_so_in_one_line(
        self, fault: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """To clients and in the log, without a traceback and what gloo says."""
        fault("1 1 leave")
        words = "worker 3.0 lost the connection to another worker"
        with running(tmp_path, 2) as workers:
            workers.submit().result()
            with pytest.raises(EngineDeadError, match=rf"^{re.escape(words)}$"):
                workers.submit().result()
        log = capfd.readouterr().err
        assert len(re.findall(rf"WARNING .* step \d+ failed: {re.escape(words)}$", log, re.MULTILINE)) == 1
        assert "Traceback" not in log
        assert "gloo" not in log

    def test_a_stopped_worker_is_given_up_and_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stopped, "STOPPED_S", 1.0)
        with running(tmp_path, 2) as workers:
            workers.processes[1].suspend()
            with pytest.raises(EngineDeadError, match=r"^worker 3.1 was stopped \(SIGSTOP\) for 1 s$"):
                workers.submit().result()
            assert workers.lost.wait(DEADLINE_S)
            assert workers.losses == ["worker 3.1 was stopped (SIGSTOP) for 1 s"]
