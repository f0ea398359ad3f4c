"""Images whose bytes workers find in shared memory: answers are those of images that come along, and who loses one
because another request has ended has it encoded again."""

import contextlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.support.image_engine import ImageEngine, image_config, items_of
from tests.support.media_forward import MediaPrompt, prompt, random_image
from tests.support.shared_media import segment
from tests.support.tiny_media_models import MediaFamily, cached_tiny_media_model
from tokenmill_engine.config.engine import EngineConfig, SchedulerConfig
from tokenmill_engine.config.parallel import ParallelConfig
from tokenmill_engine.executor.multiproc import MultiprocExecutor
from tokenmill_engine.executor.uniproc import UniprocExecutor
from tokenmill_engine.executor.worker_pool import WorkerPool
from tokenmill_engine.ipc.object_store import Lease, ObjectStore
from tokenmill_engine.ipc.shared_objects import SharedObjects
from tokenmill_engine.messages import AbortRequests, MediaItem
from tokenmill_engine.outputs import StepPlan
from tokenmill_engine.worker.wire import encode_plan

pytestmark = pytest.mark.slow

FAMILIES: tuple[MediaFamily, ...] = ("llava", "qwen2_vl")
SCHEDULER = SchedulerConfig(explicit_budget=True, max_num_batched_tokens=16, encoder_cache_tokens=20)
"""Prompts and images are computed in chunks."""
LARGE_STEPS = SchedulerConfig(explicit_budget=True, max_num_batched_tokens=256, encoder_cache_tokens=64)
NUM_GRAINS = 64


def prompts(engine: ImageEngine) -> list[MediaPrompt]:
    wide, high = (random_image(engine.media, grid, seed) for seed, grid in enumerate(((1, 4, 6), (1, 10, 2))))
    return [
        prompt(engine.media, [5, wide, 4]),
        prompt(engine.media, [3, high, 6, wide, 2], seed=1),
        prompt(engine.media, [9], seed=2),
    ]


@contextlib.contextmanager
def engine_of(config: EngineConfig, segments: list[int], folder: Path) -> Iterator[ImageEngine]:
    if config.parallel.executor == "mp":
        pool = WorkerPool(config.parallel.world_size, segments=segments)
        executor = MultiprocExecutor(config, pool, 0, str(folder / "store"), lambda error: None)
        engine = ImageEngine(config, executor, executor.initialize())
    else:
        alone = UniprocExecutor(config, shared=SharedObjects(segments))
        engine = ImageEngine(config, alone, alone.initialize())
    try:
        yield engine
    finally:
        engine.core.shutdown()


def config_of(family: MediaFamily, size: int, scheduler: SchedulerConfig = SCHEDULER) -> EngineConfig:
    parallel = ParallelConfig(size, 1, executor="mp" if size > 1 else "uni")
    return image_config(cached_tiny_media_model(family), scheduler, parallel=parallel)


@cache
def expected(family: MediaFamily, scheduler: SchedulerConfig = SCHEDULER) -> list[list[int]]:
    engine = ImageEngine(config_of(family, 1, scheduler))
    try:
        return [engine.ask([each])[0] for each in prompts(engine)]
    finally:
        engine.core.shutdown()


def shared(store: ObjectStore, items: tuple[MediaItem, ...]) -> tuple[tuple[MediaItem, ...], list[Lease]]:
    """The items with their tensors' bytes in `store`, for as long as the leases last."""
    leases = [store.put(item.key, item.tensors) for item in items]
    assert None not in leases
    kept = [lease for lease in leases if lease is not None]
    return tuple(
        replace(item, tensors=lease.tensors, shared=lease.shared) for item, lease in zip(items, kept, strict=True)
    ), kept


def add(engine: ImageEngine, store: ObjectStore, asked: MediaPrompt) -> tuple[int, list[Lease]]:
    media, leases = shared(store, items_of(engine.media, asked))
    return engine.add(asked, media=media), leases


def overwrite(store: ObjectStore, leases: list[Lease], items: tuple[MediaItem, ...]) -> None:
    """What was leased goes, and is written over."""
    for lease in leases:
        lease.release()
    store.clear()
    others = [replace(item, key=bytes(reversed(item.key))) for item in items]
    shared(store, tuple(others))
    assert all(lease.read() is None for lease in leases)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [1, 2])
def test_answers_are_those_of_images_that_come_along(family: MediaFamily, size: int, tmp_path: Path) -> None:
    """From two API servers at once."""
    with segment(NUM_GRAINS) as one, segment(NUM_GRAINS) as other:
        stores = [ObjectStore(fd, number, 1 << 30) for number, fd in enumerate((one, other))]
        with engine_of(config_of(family, size), [one, other], tmp_path) as engine:
            asked = [(store, each) for store in stores for each in prompts(engine)]
            request_ids = [add(engine, store, each)[0] for store, each in asked]
            engine.run()
            assert engine.errors == {}
            assert [engine.tokens[each] for each in request_ids] == expected(family) * 2


def test_plans_carry_no_pixels(tmp_path: Path) -> None:
    plans: list[StepPlan] = []
    with segment(NUM_GRAINS) as memory, engine_of(config_of("qwen2_vl", 1), [memory], tmp_path) as engine:
        submit = engine.core._executor.submit

        def watched(plan: StepPlan):  # type: ignore[no-untyped-def]
            plans.append(plan)
            return submit(plan)

        engine.core._executor.submit = watched  # type: ignore[method-assign]
        add(engine, ObjectStore(memory, 0, 1 << 30), prompts(engine)[1])
        engine.run()
    encoding = [plan for plan in plans if plan.media is not None and plan.media.encode]
    assert encoding
    assert max(sum(map(len, encode_plan(plan))) for plan in encoding) < 2048


@pytest.mark.parametrize("size", [1, 2])
def test_who_shares_an_image_with_one_that_ended_is_answered(size: int, tmp_path: Path) -> None:
    """The first request brings the image; it ends, and its memory is written over, before the worker looks. The second
    one, in the same step, has its own."""
    with segment(NUM_GRAINS) as one, segment(NUM_GRAINS) as other:
        stores = [ObjectStore(fd, number, 1 << 30) for number, fd in enumerate((one, other))]
        with engine_of(config_of("qwen2_vl", size, LARGE_STEPS), [one, other], tmp_path) as engine:
            asked = prompts(engine)[0]
            first, leases = add(engine, stores[0], asked)
            second, _ = add(engine, stores[1], asked)
            third = engine.add(prompts(engine)[2])
            overwrite(stores[0], leases, items_of(engine.media, asked))
            engine.run()
            assert engine.errors == {first: "an image of this request could not be encoded"}
            answers = expected("qwen2_vl", LARGE_STEPS)
            assert engine.tokens[second] == answers[0]
            assert engine.tokens[third] == answers[2]
            assert engine.core.scheduler.counters.num_preemptions == 0


@pytest.mark.parametrize("size", [1, 2])
def test_who_comes_a_step_later_is_answered_too(size: int, tmp_path: Path) -> None:
    """The one who brought the image was aborted while the step with it was in flight; the next step, which looks at the
    same image, is in flight as well."""
    with segment(NUM_GRAINS) as one, segment(NUM_GRAINS) as other:
        stores = [ObjectStore(fd, number, 1 << 30) for number, fd in enumerate((one, other))]
        with engine_of(config_of("qwen2_vl", size, LARGE_STEPS), [one, other], tmp_path) as engine:
            asked = prompts(engine)[0]
            first, leases = add(engine, stores[0], asked)
            overwrite(stores[0], leases, items_of(engine.media, asked))
            engine.core._fill_pipeline()
            second, _ = add(engine, stores[1], asked)
            engine.core._fill_pipeline()
            engine.core.handle(AbortRequests([first]))
            engine.run()
            assert engine.errors == {}
            assert engine.tokens[second] == expected("qwen2_vl", LARGE_STEPS)[0]


def test_an_engine_without_the_memory_says_so_to_the_request_alone(tmp_path: Path) -> None:
    with segment(NUM_GRAINS) as memory, engine_of(config_of("qwen2_vl", 1), [], tmp_path) as engine:
        first, _ = add(engine, ObjectStore(memory, 0, 1 << 30), prompts(engine)[0])
        second = engine.add(prompts(engine)[2])
        engine.run()
        assert engine.errors == {first: "an image of this request could not be encoded"}
        assert engine.tokens[second] == expected("qwen2_vl")[2]
