"""Images on their way to workers in processes of their own: answers are those of a worker in this process."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.support.image_engine import BLOCK_SIZE, ImageEngine, image_config
from tests.support.media_forward import MediaPrompt, prompt, random_image, random_video
from tests.support.media_items import make_pixels, with_values
from tests.support.tiny_media_models import MediaFamily, cached_tiny_media_model, is_qwen
from tokenmill_engine.config.engine import EngineConfig, SchedulerConfig
from tokenmill_engine.config.media import EncoderMode
from tokenmill_engine.config.parallel import ParallelConfig
from tokenmill_engine.executor import worker_pool
from tokenmill_engine.executor.multiproc import MultiprocExecutor
from tokenmill_engine.executor.worker_pool import WorkerPool
from tokenmill_engine.outputs import EncoderInput, PlaceholderRows, StepMedia
from tokenmill_engine.worker.rehearsal import GREEDY, rehearsal_plan

pytestmark = pytest.mark.slow

FAMILIES: tuple[MediaFamily, ...] = ("llava", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SCHEDULER = SchedulerConfig(explicit_budget=True, max_num_batched_tokens=16, encoder_cache_tokens=20)
"""Prompts and images are computed in chunks."""
SMALL_RING_BYTES = 4096
PREEMPTING_BLOCKS = 18


def prompts(engine: ImageEngine) -> list[MediaPrompt]:
    wide, high = (random_image(engine.media, grid, seed) for seed, grid in enumerate(((1, 4, 6), (1, 10, 2))))
    return [
        prompt(engine.media, [5, wide, 4]),
        prompt(engine.media, [3, high, 6, wide, 2], seed=1),
        prompt(engine.media, [9], seed=2),
        prompt(engine.media, [2, high, 3], seed=3),
    ]


def config_of(
    family: MediaFamily,
    parallel: ParallelConfig | None = None,
    mode: EncoderMode = "weights",
    num_heads: int = 2,
    **changes: int,
) -> EngineConfig:
    """`num_heads` of the encoder and the decoder, with 8 and 16 numbers each."""
    width = 16 * num_heads
    text = {"hidden_size": width, "num_attention_heads": num_heads, "num_key_value_heads": num_heads}
    vision: dict[str, int] = {"hidden_size": 8 * num_heads}
    vision["num_heads" if is_qwen(family) else "num_attention_heads"] = num_heads
    if family == "qwen2_vl":
        vision |= {"embed_dim": 8 * num_heads, "hidden_size": width}
    elif is_qwen(family):
        vision |= {"out_hidden_size": width}
    folder = cached_tiny_media_model(family, text_config=text | {"intermediate_size": 96}, vision_config=vision)
    scheduler = replace(SCHEDULER, encoder_cache_tokens=48) if family == "llava_onevision" else SCHEDULER
    config = image_config(folder, scheduler, parallel=parallel or ParallelConfig(), **changes)
    return replace(config, model=replace(config.model, encoder_mode=mode))


@cache
def expected(family: MediaFamily, num_heads: int = 2) -> list[list[int]]:
    engine = ImageEngine(config_of(family, num_heads=num_heads))
    try:
        return engine.ask(prompts(engine))
    finally:
        engine.core.shutdown()


@contextlib.contextmanager
def workers(folder: Path, config: EngineConfig) -> Iterator[ImageEngine]:
    pool = WorkerPool(config.parallel.world_size)
    executor = MultiprocExecutor(config, pool, 0, str(folder / "store"), lambda error: None)
    try:
        yield ImageEngine(config, executor, executor.initialize())
    finally:
        executor.shutdown()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("num_members", "num_stages", "mode"),
    [(1, 1, "weights"), (2, 1, "weights"), (2, 1, "data"), (1, 2, "weights"), (2, 2, "weights"), (2, 2, "data")],
)
def test_answers_are_those_of_a_worker_in_this_process(
    family: MediaFamily, num_members: int, num_stages: int, mode: EncoderMode, tmp_path: Path
) -> None:
    """The second time from the prefix cache, whose hits may end within an image."""
    parallel = ParallelConfig(num_members, num_stages, executor="mp")
    with workers(tmp_path, config_of(family, parallel, mode)) as engine:
        assert engine.ask(prompts(engine)) == expected(family)
        assert engine.ask(prompts(engine)[:2]) == expected(family)[:2]
        assert any(engine.cached.values())


@pytest.mark.parametrize(
    ("family", "num_members", "num_stages", "mode"),
    [("qwen2_vl", 2, 1, "data"), ("qwen2_5_vl", 1, 2, "weights"), ("qwen2_5_vl", 2, 1, "weights")],
)
def test_videos_beside_images(
    family: MediaFamily, num_members: int, num_stages: int, mode: EncoderMode, tmp_path: Path
) -> None:
    def asked(engine: ImageEngine) -> list[MediaPrompt]:
        seconds = 1.5 if family == "qwen2_5_vl" else None
        video, image = random_video(engine.media, (3, 4, 4), 3, seconds), random_image(engine.media, (1, 4, 6), 0)
        return [prompt(engine.media, [5, video, 4]), prompt(engine.media, [3, image, 2, video, 6], seed=1)]

    alone = ImageEngine(config_of(family))
    answers = alone.ask(asked(alone))
    alone.core.shutdown()
    with workers(tmp_path, config_of(family, ParallelConfig(num_members, num_stages, executor="mp"), mode)) as engine:
        assert engine.ask(asked(engine)) == answers
        assert engine.errors == {}


@pytest.mark.parametrize("mode", ["weights", "data"])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_of_three_workers(family: MediaFamily, mode: EncoderMode, tmp_path: Path) -> None:
    with workers(tmp_path, config_of(family, ParallelConfig(3, executor="mp"), mode, num_heads=3)) as engine:
        assert engine.ask(prompts(engine)) == expected(family, num_heads=3)


@pytest.mark.parametrize(("num_members", "num_stages"), [(1, 1), (2, 1), (1, 2)])
def test_an_image_may_be_larger_than_the_ring_that_plans_go_through(
    num_members: int, num_stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten times as large here; streams beside it go on, and the next plans come as they were sent."""
    scheduler = replace(SCHEDULER, encoder_cache_tokens=256)

    def ask(engine: ImageEngine) -> list[list[int]]:
        media = engine.media
        large, other = (random_image(media, (1, 30, 30), seed) for seed in range(2))
        asked = [prompt(media, [9], seed=2), prompt(media, [5, large, 4]), prompt(media, [3, other, 2, large, 1])]
        return engine.ask(asked) + engine.ask(prompts(engine))

    folder = cached_tiny_media_model("qwen2_vl")
    alone = ImageEngine(image_config(folder, scheduler))
    answers = ask(alone)
    alone.core.shutdown()
    monkeypatch.setattr(worker_pool, "_PLANS_BYTES", SMALL_RING_BYTES)
    parallel = ParallelConfig(num_members, num_stages, executor="mp")
    with workers(tmp_path, image_config(folder, scheduler, parallel=parallel)) as engine:
        assert ask(engine) == answers
        assert not engine.errors


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_preempted_requests_are_answered_the_same_in_stages(family: MediaFamily, tmp_path: Path) -> None:
    parallel = ParallelConfig(1, 2, executor="mp")
    with workers(tmp_path, config_of(family, parallel, num_blocks=PREEMPTING_BLOCKS)) as engine:
        asked, answers = prompts(engine), expected(family)
        assert engine.ask([asked[0], asked[3], asked[2]] * 2) == [answers[0], answers[3], answers[2]] * 2
        assert engine.core.scheduler.counters.num_preemptions > 0


@pytest.mark.parametrize(
    ("num_members", "num_stages", "mode"), [(2, 1, "data"), (2, 1, "weights"), (1, 2, "weights"), (2, 2, "data")]
)
def test_an_image_that_cannot_be_encoded_fails_its_row_alone_whichever_worker_has_it(
    num_members: int, num_stages: int, mode: EncoderMode, tmp_path: Path
) -> None:
    parallel = ParallelConfig(num_members, num_stages, executor="mp")
    tensors = with_values(make_pixels((20, 48)))
    with workers(tmp_path, config_of("qwen2_vl", parallel, mode)) as engine:
        plan = rehearsal_plan(2, 8, 1, BLOCK_SIZE, GREEDY)
        starts = [replace(start, block_ids=([2 * row, 2 * row + 1],)) for row, start in enumerate(plan.starts)]
        plan = replace(plan, starts=starts)
        expected = engine.core._executor.submit(plan).result()
        for entry in range(2):
            media = StepMedia(
                [],
                [EncoderInput(entry, "image", 6, (1, 4, 6), tensors)],
                [PlaceholderRows(1, 1, 6, entry, 0)],
            )
            result = engine.core._executor.submit(replace(plan, media=media)).result()
            assert result.errors == {1: "an image of this request could not be encoded"}
            assert result.lost_entries == (entry,)
            assert result.num_new.tolist() == [1, 0]
            assert result.token_ids[0].tolist() == expected.token_ids[0].tolist()


@pytest.mark.parametrize(
    ("rank", "num_members", "num_stages", "mode"),
    [
        ("1", 2, 1, "data"),
        ("1", 2, 1, "weights"),
        ("all", 2, 1, "weights"),
        ("0", 1, 2, "weights"),
        ("1", 2, 2, "weights"),
    ],
)
def test_an_encoder_that_fails_harms_nobody_else(
    rank: str, num_members: int, num_stages: int, mode: EncoderMode, fault: Callable[[str], Path], tmp_path: Path
) -> None:
    """Whichever worker it fails on, or on all of them; in parts, in the middle of what they compute together. Who asks
    for the same image again is answered."""
    fault(f"{rank} encode starve")
    parallel = ParallelConfig(num_members, num_stages, executor="mp")
    with workers(tmp_path, config_of("qwen2_vl", parallel, mode)) as engine:
        asked = prompts(engine)
        # In data mode it is the second image that the second worker encodes, alone.
        first, other = engine.add(asked[1 if mode == "data" else 0]), engine.add(asked[2])
        engine.run()
        assert engine.errors == {first: "an image of this request could not be encoded"}
        assert engine.tokens[other] == expected("qwen2_vl")[2]
        assert engine.ask(asked) == expected("qwen2_vl")
        assert len(engine.errors) == 1
