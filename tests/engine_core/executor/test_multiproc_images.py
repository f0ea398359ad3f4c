"""Images on their way to workers in processes of their own: answers are those of a worker in this process."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.image_engine import ImageEngine, image_config
from tests.support.media_forward import MediaPrompt, prompt, random_image
from tests.support.tiny_media_models import MediaFamily, cached_tiny_media_model
from tokenmill_engine.config.engine import SchedulerConfig
from tokenmill_engine.config.parallel import ParallelConfig
from tokenmill_engine.executor import worker_pool
from tokenmill_engine.executor.multiproc import MultiprocExecutor
from tokenmill_engine.executor.worker_pool import WorkerPool

pytestmark = pytest.mark.slow

SCHEDULER = SchedulerConfig(explicit_budget=True, max_num_batched_tokens=16, encoder_cache_tokens=20)
SMALL_RING_BYTES = 4096


def prompts(engine: ImageEngine) -> list[MediaPrompt]:
    wide, high = (random_image(engine.media, grid, seed) for seed, grid in enumerate(((1, 4, 6), (1, 10, 2))))
    return [
        prompt(engine.media, [5, wide, 4]),
        prompt(engine.media, [3, high, 6, wide, 2], seed=1),
        prompt(engine.media, [9], seed=2),
    ]


@pytest.fixture(params=["llava", "qwen2_vl"])
def family(request: pytest.FixtureRequest) -> MediaFamily:
    chosen: MediaFamily = request.param
    return chosen


@pytest.fixture
def expected(family: MediaFamily) -> Iterator[list[list[int]]]:
    engine = ImageEngine(image_config(cached_tiny_media_model(family), SCHEDULER))
    yield engine.ask(prompts(engine))
    engine.core.shutdown()


@pytest.mark.parametrize(("size", "ring_bytes"), [(1, None), (2, None), (1, SMALL_RING_BYTES)])
def test_answers_are_those_of_a_worker_in_this_process(
    family: MediaFamily,
    expected: list[list[int]],
    size: int,
    ring_bytes: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if an image is several times larger than the ring that plans go through."""
    if ring_bytes is not None:
        monkeypatch.setattr(worker_pool, "_PLANS_BYTES", ring_bytes)
    config = dataclasses.replace(
        image_config(cached_tiny_media_model(family), SCHEDULER),
        parallel=ParallelConfig(tensor_parallel_size=size, executor="mp"),
    )
    executor = MultiprocExecutor(config, WorkerPool(size), 0, str(tmp_path / "store"), lambda error: None)
    try:
        engine = ImageEngine(config, executor, executor.initialize())
        assert engine.ask(prompts(engine)) == expected
        assert engine.ask(prompts(engine)[:1]) == expected[:1]
    finally:
        executor.shutdown()
