"""Workers that have a model's stages answer as one that has all of it, to the last log-probability."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine_core.worker.conftest import BLOCK_SIZE, tiny_engine_config
from tests.support.core_requests import CoreRequests, Told
from tests.support.staged_workers import StagedWorkers
from tests.support.tiny_media_models import cached_tiny_media_model
from tests.support.tiny_models import cached_tiny_model
from tokenmill_engine.config.engine import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from tokenmill_engine.config.parallel import ParallelConfig
from tokenmill_engine.executor.uniproc import UniprocExecutor
from tokenmill_engine.messages import AbortRequests, FinishReason, SamplingParams
from tokenmill_engine.worker.media_rehearsal import MediaRehearsal
from tokenmill_engine.worker.rehearsal import GREEDY as REHEARSED
from tokenmill_engine.worker.rehearsal import rehearsal_plan
from tokenmill_engine.worker.worker import Worker

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
SPLITS = [(1, 2), (2, 1), (1, 1, 1)]
"""Of three layers."""


def config_of(
    split: tuple[int, ...] | None, num_blocks: int = 64, is_async: bool = True, **changes: Any
) -> EngineConfig:
    """One worker that runs every operator by itself, or one for each stage."""
    config = tiny_engine_config(
        cache=CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=num_blocks),
        scheduler=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=48, explicit_budget=True, async_scheduling=is_async
        ),
        **changes,
    )
    config = replace(config, device=DeviceConfig(kind="cpu", num_threads=1, enforce_eager=True))
    if split is None:
        return config
    return replace(config, parallel=ParallelConfig(pipeline_parallel_size=len(split), pipeline_layers=split))


def prompts(count: int, longest: int = 100) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(10, 500, size=size).tolist() for size in rng.integers(3, longest, size=count)]


def compare(
    meeting: Path, split: tuple[int, ...], drive: Callable[[CoreRequests], None], **changes: Any
) -> tuple[list[Told], int]:
    """What the same requests are told by both engines, which must be the same, and how often one was preempted."""
    config = config_of(None, **changes)
    alone = UniprocExecutor(config)
    expected = CoreRequests(config, alone, alone.initialize())
    drive(expected)
    whole = expected.run()
    alone.shutdown()
    staged_config = config_of(split, **changes)
    with StagedWorkers(staged_config, meeting) as executor:
        assert len({capacity.num_blocks for capacity in executor.capacities}) == 1
        found = CoreRequests(staged_config, executor, executor.capacities[-1])
        drive(found)
        assert found.run() == whole
        assert len(whole) > 0
    return whole, found.core.scheduler.counters.num_preemptions


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("is_async", [True, False])
def test_prompts_in_chunks_and_streams(tmp_path: Path, split: tuple[int, ...], is_async: bool) -> None:
    def drive(requests: CoreRequests) -> None:
        for number, prompt in enumerate(prompts(10)):
            requests.add(number, prompt, GREEDY)

    told, _ = compare(tmp_path, split, drive, is_async=is_async)
    assert [each.finishes for each in told] == [[FinishReason.LENGTH]] * 10


@pytest.mark.parametrize("split", [(2, 1), (1, 1, 1)])
def test_sampling_penalties_and_logprobs(tmp_path: Path, split: tuple[int, ...]) -> None:
    samplings = [
        SamplingParams(temperature=0.9, seed=7, max_tokens=15, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=15, ignore_eos=True, repetition_penalty=1.3, presence_penalty=0.5),
        SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, prompt_logprobs=1),
        SamplingParams(temperature=1.0, seed=9, max_tokens=9, min_tokens=3, stop_token_ids=tuple(range(250))),
    ]

    def drive(requests: CoreRequests) -> None:
        for number, prompt in enumerate(prompts(8)):
            requests.add(number, prompt, samplings[number % len(samplings)])

    told, _ = compare(tmp_path, split, drive, folder=cached_tiny_model("qwen3", tie_word_embeddings=True))
    assert told[0].logprobs
    assert len(told[2].prompt_logprobs) == 2 * (len(prompts(8)[2]) - 1)


def test_preemption(tmp_path: Path) -> None:
    def drive(requests: CoreRequests) -> None:
        for number, prompt in enumerate(prompts(6, longest=40)):
            requests.add(number, prompt, replace_tokens(GREEDY, 40))

    _, num_preemptions = compare(tmp_path, (1, 1, 1), drive, num_blocks=14)
    assert num_preemptions > 0


def replace_tokens(sampling: SamplingParams, max_tokens: int) -> SamplingParams:
    values = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    return SamplingParams(**{**values, "max_tokens": max_tokens})


def test_a_prefix_found_in_the_cache(tmp_path: Path) -> None:
    first, second = prompts(2)
    shared = [*range(100, 164)]

    def drive(requests: CoreRequests) -> None:
        requests.add(0, shared + first, GREEDY)
        requests.run()
        requests.add(1, shared + second, GREEDY)
        requests.run()
        assert requests.core.scheduler.counters.prefix_cache_hits == 64

    compare(tmp_path, (1, 2), drive)


def test_slots_of_aborted_requests_are_taken_over_at_once(tmp_path: Path) -> None:
    """The token that the old request had in flight must not reach the new one."""
    texts = prompts(24, longest=30)
    with StagedWorkers(config_of((1, 1, 1)), tmp_path) as executor:
        requests = CoreRequests(config_of((1, 1, 1)), executor, executor.capacities[-1])
        ids = [requests.add(number, text, GREEDY) for number, text in enumerate(texts)]
        for number in range(0, 24, 2):
            requests.step()
            requests.core.handle(AbortRequests([ids[number]]))
        requests.run()
    config = config_of(None)
    alone = UniprocExecutor(config)
    expected = CoreRequests(config, alone, alone.initialize())
    for number, text in enumerate(texts):
        expected.add(number, text, GREEDY)
    expected.run()
    alone.shutdown()
    for number, request_id in enumerate(ids):
        tokens = requests.told[request_id].tokens
        whole = expected.told[request_id].tokens
        assert tokens == (whole if number % 2 else whole[: len(tokens)])


def test_all_stages_have_as_many_blocks_as_the_one_with_the_fewest(tmp_path: Path) -> None:
    cache = CacheConfig(block_size=BLOCK_SIZE, kv_cache_memory_bytes=1 << 20)
    config = replace(config_of((2, 1)), cache=cache)
    with StagedWorkers(config, tmp_path) as executor:
        first, last = executor.capacities
        assert first.num_blocks == last.num_blocks == (1 << 20) // first.groups[0].block_bytes(BLOCK_SIZE)
        assert first.groups[0].block_bytes(BLOCK_SIZE) == 2 * last.groups[0].block_bytes(BLOCK_SIZE)


class Mailbox:
    """Three stages in one thread; `times` is what the first one is said to have taken, and to have encoded."""

    size = 3

    def __init__(self, rank: int, messages: list[torch.Tensor], times: tuple[float, float]) -> None:
        self.rank, self._messages, self._times = rank, messages, times

    def send(self, x: torch.Tensor, tag: int) -> None:
        if self.rank == 0:
            x[-16:] = torch.tensor(self._times, dtype=torch.float64).view(torch.uint8)
        self._messages.append(x)

    def receive(self, out: torch.Tensor, tag: int) -> torch.Tensor:
        return out.copy_(self._messages.pop(0))

    def agree_min(self, value: int) -> int:
        return value

    def close(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize("slowest_s", [0.0, 1000.0])
def test_a_step_takes_as_long_as_in_the_slowest_stage(slowest_s: float) -> None:
    config, messages = config_of((1, 1, 1)), []
    workers = [Worker(config, chain=Mailbox(rank, messages, (slowest_s, 2.5))) for rank in range(3)]
    for worker in workers:
        worker.initialize()
    plan = rehearsal_plan(1, 5, 1, BLOCK_SIZE, REHEARSED)
    first, second, last = [worker.execute(plan).wait() for worker in workers]
    assert first.num_new.tolist() == second.num_new.tolist() == [0]
    assert last.num_new.tolist() == [1]
    assert last.elapsed_s == slowest_s or (slowest_s == 0.0 and 0.0 < last.elapsed_s < 100.0)
    assert last.encoder_s == 2.5
    assert messages == []


def test_the_last_stage_tells_how_long_the_first_one_encoded(tmp_path: Path) -> None:
    config = tiny_engine_config(folder=cached_tiny_media_model("qwen2_vl"))
    config = replace(config, parallel=ParallelConfig(pipeline_parallel_size=2))
    assert config.model.media is not None
    with StagedWorkers(config, tmp_path) as executor:
        text = rehearsal_plan(1, 5, 1, BLOCK_SIZE, REHEARSED)
        with_image = MediaRehearsal(config, config.model.media, 1).step()
        results = [executor.submit(plan).result() for plan in (text, with_image, text)]
    assert [result.encoder_s > 0.0 for result in results] == [False, True, False]
    assert results[1].encoder_s < results[1].elapsed_s
