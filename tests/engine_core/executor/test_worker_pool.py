"""Workers' processes as such: their ends, whatever they die of, and starts that do not go on."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.engine_core.worker.conftest import tiny_engine_config
from tests.support.server import wait_for
from tokenmill_engine.config.parallel import ParallelConfig
from tokenmill_engine.errors import StartupError
from tokenmill_engine.executor.worker_pool import WorkerPool
from tokenmill_engine.ipc import stopped

pytestmark = pytest.mark.slow

DEADLINE_S = 60.0

WATCHER_FAILS = """
from tokenmill_engine.executor.worker_pool import WorkerPool
import signal

def fail(reason):
    raise ValueError(reason)

pool = WorkerPool(1)
pool.watch(fail)
pool._children[0].process.kill()
while True:
    signal.pause()
"""

SMALL_FILES = """
import psutil, resource
from tokenmill_engine.errors import StartupError
from tokenmill_engine.executor.worker_pool import WorkerPool
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    WorkerPool(2)
except StartupError as error:
    print(error)
assert not psutil.Process().children()
"""


@contextmanager
def waiting_pool(size: int, patience_s: float = 60.0) -> Iterator[tuple[WorkerPool, list[psutil.Process]]]:
    """Workers that are not configured yet."""
    pool = WorkerPool(size, patience_s)
    try:
        yield pool, [psutil.Process(child.process.pid) for child in pool._children]
    finally:
        pool.stop()


@pytest.mark.parametrize(
    ("number", "words"),
    [(40, "was ended by signal 40"), (signal.SIGUSR1, "was ended by SIGUSR1"), (signal.SIGKILL, "was killed")],
)
def test_a_worker_ended_by_any_signal_is_lost(number: int, words: str) -> None:
    """Also by one that has no name."""
    losses: list[str] = []
    lost = threading.Event()

    def on_lost(reason: str) -> None:
        losses.append(reason)
        lost.set()

    with waiting_pool(2) as (pool, processes):
        pool.watch(on_lost)
        processes[1].send_signal(number)
        assert lost.wait(DEADLINE_S)
        assert pool.lost == losses[0]
        assert losses[0].startswith(f"worker 1 {words}")


def test_a_stopped_worker_is_lost_unless_nobody_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopped, "LOOK_S", 0.2)
    monkeypatch.setattr(stopped, "STOPPED_S", 1.0)
    lost = threading.Event()
    with waiting_pool(2) as (patient, held), waiting_pool(2) as (pool, processes):
        patient.gives_up = False
        held[0].suspend()
        patient.watch(lambda _reason: None)
        processes[1].suspend()
        pool.watch(lambda _reason: lost.set())
        assert lost.wait(DEADLINE_S)
        assert pool.lost == "worker 1 was stopped (SIGSTOP) for 1 s"
        assert patient.lost is None


def test_a_watch_that_fails_ends_the_engine_core() -> None:
    """Nobody would notice any more that a worker is gone."""
    done = subprocess.run(
        [sys.executable, "-c", WATCHER_FAILS], check=False, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 1
    assert "thread worker-watcher failed" in done.stderr
    assert "ValueError: worker 0 was killed" in done.stderr


def test_a_start_that_waits_for_a_stopped_worker_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Again and again, until it goes on."""
    config = dataclasses.replace(tiny_engine_config(), parallel=ParallelConfig(tensor_parallel_size=2, executor="mp"))
    offers: list[int] = []
    with waiting_pool(2, patience_s=0.5) as (pool, processes):
        pool.gives_up = False
        processes[1].suspend()
        start = threading.Thread(
            target=lambda: offers.extend(offer.num_blocks for offer in pool.start(config, 3, str(tmp_path / "store")))
        )
        start.start()

        def warnings() -> list[str]:
            return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

        wait_for(lambda: len(warnings()) >= 2, DEADLINE_S, "two warnings")
        processes[1].resume()
        start.join(DEADLINE_S)
        assert len(offers) == 2
        words = r"the start has waited \d+ s; not ready: worker 3\.0, worker 3\.1 \(stopped\)"
        assert re.fullmatch(words, warnings()[0])


def test_a_start_ends_for_a_worker_that_stays_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopped, "STOPPED_S", 1.0)
    config = dataclasses.replace(tiny_engine_config(), parallel=ParallelConfig(tensor_parallel_size=2, executor="mp"))
    with waiting_pool(2) as (pool, processes):
        processes[1].suspend()
        with pytest.raises(StartupError, match=r"^worker 3\.1 was stopped \(SIGSTOP\) for 1 s while it was starting$"):
            pool.start(config, 3, str(tmp_path / "store"))


def test_a_file_that_may_not_be_so_large_is_told_of() -> None:
    done = subprocess.run([sys.executable, "-c", SMALL_FILES], check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout == "2 workers cannot be started: a file would be too large: raise `ulimit -f`\n"


def test_one_that_cannot_join_the_others_has_the_name_of_logs(tmp_path: Path) -> None:
    """They meet in files; here the folder of these is gone."""
    config = dataclasses.replace(tiny_engine_config(), parallel=ParallelConfig(tensor_parallel_size=2, executor="mp"))
    with waiting_pool(2) as (pool, _):
        reason = r"^worker 3\.[01] cannot join the others: the folder .*nowhere is gone$"
        with pytest.raises(StartupError, match=reason):
            pool.start(config, 3, os.fspath(tmp_path / "nowhere" / "store"))
