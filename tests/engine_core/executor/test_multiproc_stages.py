"""Workers in processes of their own that have the stages of a model: the same answers as one worker, and faults."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.engine_core.executor.test_uniproc import broken_plan
from tests.engine_core.worker.conftest import BLOCK_SIZE, tiny_engine_config
from tests.support.core_requests import CoreRequests, Told
from tests.support.tiny_models import cached_tiny_model
from tokenmill_engine.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from tokenmill_engine.config.parallel import ParallelConfig
from tokenmill_engine.errors import EngineDeadError, EngineError
from tokenmill_engine.executor.multiproc import MultiprocExecutor, slowest_costs
from tokenmill_engine.executor.uniproc import UniprocExecutor
from tokenmill_engine.executor.worker_pool import WorkerPool
from tokenmill_engine.messages import AbortRequests, SamplingParams
from tokenmill_engine.outputs import KVCapacity
from tokenmill_engine.worker.rehearsal import GREEDY, rehearsal_plan

pytestmark = pytest.mark.slow

DEADLINE_S = 60.0
LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def config_of(parallel: ParallelConfig, num_blocks: int = 64) -> EngineConfig:
    config = tiny_engine_config(
        folder=cached_tiny_model("llama", num_attention_heads=4, num_key_value_heads=2),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=48, explicit_budget=True),
    )
    return dataclasses.replace(config, parallel=parallel)


class Stages:
    """A ready executor and its workers' processes."""

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        self.config = config
        self.pool = WorkerPool(config.parallel.world_size)
        self.processes = [psutil.Process(child.process.pid) for child in self.pool._children]
        self.lost = threading.Event()
        self.executor = MultiprocExecutor(config, self.pool, 0, str(folder / "store"), lambda _: self.lost.set())
        self.capacity: KVCapacity = self.executor.initialize()


@contextlib.contextmanager
def stages(folder: Path, num_stages: int, num_members: int = 1, num_blocks: int = 64) -> Iterator[Stages]:
    parallel = ParallelConfig(num_members, num_stages, executor="mp")
    ready = Stages(folder, config_of(parallel, num_blocks))
    try:
        yield ready
    finally:
        ready.executor.shutdown()
        assert psutil.wait_procs(ready.processes, timeout=DEADLINE_S)[1] == []
        assert list(folder.iterdir()) == []


def add_all(requests: CoreRequests) -> None:
    rng = np.random.default_rng(3)
    for number, size in enumerate(rng.integers(3, 90, size=10)):
        requests.add(number, rng.integers(10, 500, size=size).tolist(), LONG)


def answers_of_one_worker() -> list[Told]:
    config = config_of(ParallelConfig())
    executor = UniprocExecutor(config)
    requests = CoreRequests(config, executor, executor.initialize())
    try:
        add_all(requests)
        return requests.run()
    finally:
        executor.shutdown()


@pytest.mark.parametrize(("num_stages", "num_members"), [(2, 1), (3, 1), (2, 2)])
def test_answers_are_those_of_one_worker(num_stages: int, num_members: int, tmp_path: Path) -> None:
    expected = answers_of_one_worker()
    with stages(tmp_path, num_stages, num_members) as ready:
        requests = CoreRequests(ready.config, ready.executor, ready.capacity)
        add_all(requests)
        assert requests.run() == expected


def test_preempted_and_aborted_requests_leave_the_others_as_they_are(tmp_path: Path) -> None:
    expected = answers_of_one_worker()
    with stages(tmp_path, 2, num_blocks=24) as ready:
        requests = CoreRequests(ready.config, ready.executor, ready.capacity)
        add_all(requests)
        for _ in range(6):
            requests.step()
        ids = list(requests.core.scheduler._requests)
        requests.core.handle(AbortRequests(ids[:2]))
        told = requests.run()
        assert requests.core.scheduler.counters.num_preemptions > 0
        for request_id, one in requests.told.items():
            if request_id not in ids[:2]:
                assert one == expected[request_id]
        assert len(told) >= 8


def test_a_step_that_all_stages_refuse_harms_no_other(tmp_path: Path) -> None:
    with stages(tmp_path, 2) as ready:
        good = rehearsal_plan(1, 20, 1, BLOCK_SIZE, GREEDY)
        first, bad, last = (ready.executor.submit(plan) for plan in (good, broken_plan(7), good))
        expected = first.result().token_ids.tolist()
        with pytest.raises(EngineError, match=r"^step 7 failed: IndexError") as failure:
            bad.result()
        assert not isinstance(failure.value, EngineDeadError)
        assert last.result().token_ids.tolist() == expected


@pytest.mark.parametrize("num_members", [1, 2])
def test_a_step_that_fails_behind_the_last_layer_harms_no_other(num_members: int, tmp_path: Path) -> None:
    """A bias on a token that there is not, which only who samples finds out."""
    sampling = SamplingParams(temperature=0.0, seed=0, logit_bias={600: 1.0})
    with stages(tmp_path, 2, num_members) as ready:
        plans = [rehearsal_plan(1, 20, 1, BLOCK_SIZE, each) for each in (GREEDY, sampling, GREEDY)]
        first, bad, last = (ready.executor.submit(plan) for plan in plans)
        expected = first.result().token_ids.tolist()
        with pytest.raises(EngineError, match=r"^step 0 failed: RuntimeError: index 600") as failure:
            bad.result()
        assert not isinstance(failure.value, EngineDeadError)
        assert last.result().token_ids.tolist() == expected


def test_prompts_take_as_long_as_in_the_slowest_stage() -> None:
    capacities = [
        KVCapacity(64, BLOCK_SIZE, 512, 0, (), "any", {}, costs)
        for costs in (((256, 0.1), (512, 0.4)), ((256, 0.2), (512, 0.3)))
    ]
    assert slowest_costs(capacities) == ((256, 0.2), (512, 0.4))
    assert slowest_costs([dataclasses.replace(each, prefill_costs=()) for each in capacities]) == ()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_killed_stage_is_named_and_the_others_are_ended(rank: int, tmp_path: Path) -> None:
    with stages(tmp_path, 3) as ready:
        requests = CoreRequests(ready.config, ready.executor, ready.capacity)
        add_all(requests)
        requests.step()
        ready.processes[rank].kill()
        with pytest.raises(EngineDeadError, match=rf"worker 0\.{rank} was killed"):
            requests.run()
        assert ready.lost.wait(DEADLINE_S)
