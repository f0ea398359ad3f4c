"""Images on a CUDA device: the answers of transformers, graphs on and off, whatever runs beside them; no waiting, no
kernels that are compiled late, memory."""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import triton
from torch.nn import functional as F

from tests.engine_core.engine.test_images import LARGER_SETTINGS, SETTINGS, Subject, subject_of
from tests.engine_core.engine.test_videos import film
from tests.support.device_waits import refuse_synchronization
from tests.support.image_engine import ImageEngine, items_of
from tests.support.media_forward import MediaPrompt, Reference, num_placeholders, prompt, random_image
from tests.support.model_loading import model_config
from tests.support.tiny_media_models import MediaFamily, cached_tiny_media_model
from tokenmill_engine.config.engine import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from tokenmill_engine.executor.uniproc import UniprocExecutor
from tokenmill_engine.models.loader import load_model
from tokenmill_engine.models.media_decoder import MediaDecoder
from tokenmill_engine.models.vision.encoder import ImageInput
from tokenmill_engine.models.vision.packed import PackedRuns
from tokenmill_engine.outputs import KVCapacity, StepHandle, StepPlan
from tokenmill_engine.worker.cuda_graphs import GraphStore
from tokenmill_engine.worker.shapes import StepShape
from tokenmill_engine.worker.worker import Worker

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
FAMILIES: tuple[MediaFamily, ...] = ("llava", "llava_siglip", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
_EAGER = ("llava", "qwen2_5_vl", "qwen3_vl")
WORKERS = [(family, eager) for family in FAMILIES for eager in (False, True) if not eager or family in _EAGER]
_FIRST_ENTRIES = itertools.count(0, 10_000)
NUM_BLOCKS, BLOCK_SIZE, BUDGET, NUM_OUTPUT = 200, 16, 256, 8
GRIDS = ((1, 4, 6), (1, 10, 2), (1, 6, 6), (1, 2, 2), (1, 20, 34))


def engine_config(family: MediaFamily, eager: bool = False, dtype: str = "float32", **cache: Any) -> EngineConfig:
    return EngineConfig(
        model=model_config(cached_tiny_media_model(family), dtype=dtype),
        cache=CacheConfig(BLOCK_SIZE, **(cache or {"num_gpu_blocks_override": NUM_BLOCKS})),
        scheduler=SchedulerConfig(max_num_seqs=8, explicit_budget=True, max_num_batched_tokens=BUDGET),
        device=DeviceConfig(kind="cuda", enforce_eager=eager),
    )


@cache
def started(family: MediaFamily, eager: bool, dtype: str = "float32") -> tuple[UniprocExecutor, KVCapacity]:
    """A worker that many engines use, one after another."""
    executor = UniprocExecutor(engine_config(family, eager, dtype))
    return executor, executor.initialize()


class Watched:
    """An executor that others use too: the plans it was given. `around` surrounds the enqueueing of each."""

    def __init__(self, executor: UniprocExecutor, around: Callable[[], Any] | None = None) -> None:
        self._executor, self._around = executor, around
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> StepHandle:
        self.plans.append(plan)
        if self._around is None:
            return self._executor.submit(plan)
        with self._around():
            return self._executor.submit(plan)

    def shutdown(self) -> None:
        """It goes on."""


def make_engine(
    family: MediaFamily,
    eager: bool = False,
    dtype: str = "float32",
    *,
    around: Callable[[], Any] | None = None,
    num_blocks: int = NUM_BLOCKS,
    **scheduler: Any,
) -> tuple[ImageEngine, Watched]:
    executor, capacity = started(family, eager, dtype)
    watched = Watched(executor, around)
    config = engine_config(family, eager, dtype)
    config = dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, **scheduler))
    engine = ImageEngine(config, watched, dataclasses.replace(capacity, num_blocks=num_blocks))
    # A worker takes each number for one image as long as it lives.
    engine.core.scheduler._encoder.cache._next_entry = next(_FIRST_ENTRIES)
    return engine, watched


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[Hashable]:
    """Keys of graphs that were replayed, as they are."""
    keys: list[Hashable] = []
    replay = GraphStore.replay

    def listening(store: GraphStore, key: Hashable) -> torch.Tensor | None:
        result = replay(store, key)
        if result is not None:
            keys.append(key)
        return result

    monkeypatch.setattr(GraphStore, "replay", listening)
    return keys


def answers_of(subject: Subject) -> list[list[int]]:
    return [list(answer) for answer in subject.answers]


@pytest.mark.parametrize(("family", "eager"), WORKERS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_answers_are_those_of_transformers(family: MediaFamily, eager: bool, setting: str) -> None:
    subject = subject_of(family)
    settings = SETTINGS | (LARGER_SETTINGS if subject.media.views is not None else {})
    names = ("max_num_encoder_tokens", "encoder_cache_tokens", "disable_chunked_mm_input", "async_scheduling")
    limits = {name: getattr(settings[setting], name) for name in names}
    budget = min(settings[setting].max_num_batched_tokens, BUDGET)
    engine, _ = make_engine(family, eager, max_num_batched_tokens=budget, **limits)
    for _ in range(2):  # The second time from the prefix cache.
        assert engine.ask(subject.prompts) == answers_of(subject)
    assert any(engine.cached.values())
    assert engine.errors == {}


@pytest.mark.parametrize("budget", [BUDGET, 11])
@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_answers_about_videos_are_those_of_transformers(family: MediaFamily, budget: int) -> None:
    subject = subject_of(family)
    media = subject.media
    prompts = [
        prompt(media, [4, *film(media, 3, 4, 6, seed=0), 2], seed=1),
        prompt(media, [2, random_image(media, (1, 4, 4), 9), 3, *film(media, 2, 6, 2, seed=20), 4], seed=2),
        prompt(media, [6], seed=3),
    ]
    reference = Reference(cached_tiny_media_model(family), media)
    expected = [reference.greedy(text, NUM_OUTPUT) for text in prompts]
    engine, _ = make_engine(family, max_num_batched_tokens=budget)
    assert engine.ask(prompts) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_only_steps_that_look_at_images_have_no_graph(family: MediaFamily, replayed: list[Hashable]) -> None:
    """And a text that goes on beside a prompt with images is its own."""
    subject = subject_of(family)
    engine, watched = make_engine(family)
    replayed.clear()
    text, image = engine.add(subject.prompts[2], 3 * NUM_OUTPUT), engine.add(subject.prompts[3])
    engine.run()
    later = engine.add(subject.prompts[3])
    engine.run()
    assert tuple(engine.tokens[text])[:NUM_OUTPUT] == subject.answers[2]
    assert engine.tokens[image] == engine.tokens[later] == list(subject.answers[3])
    num_without = sum(plan.media is None for plan in watched.plans)
    assert num_without >= 3 * NUM_OUTPUT - 1
    assert sum(isinstance(key, StepShape) for key in replayed) == num_without
    alone, _ = make_engine(family)
    assert alone.ask([subject.prompts[2]], 3 * NUM_OUTPUT) == [engine.tokens[text]]


@pytest.mark.parametrize("family", FAMILIES)
def test_choices_share_what_was_encoded(family: MediaFamily) -> None:
    subject = subject_of(family)
    engine, watched = make_engine(family)
    asked = subject.prompts[1]
    assert engine.ask([asked] * 3) == [list(subject.answers[1])] * 3
    num_encoded = sum(len(plan.media.encode) for plan in watched.plans if plan.media is not None)
    assert num_encoded == len(asked.images)


@pytest.mark.parametrize(("family", "eager"), WORKERS)
def test_preempted_requests_are_answered_the_same(family: MediaFamily, eager: bool) -> None:
    subject = subject_of(family)
    asked = [subject.prompts[index] for index in (0, 5, 2, 0, 5, 2)]
    roomy, _ = make_engine(family, eager)
    expected = roomy.ask(asked, 3 * NUM_OUTPUT)
    assert roomy.core.scheduler.counters.num_preemptions == 0
    assert tuple(expected[1][:NUM_OUTPUT]) == subject.answers[5]
    engine, _ = make_engine(family, eager, num_blocks=6 if subject.media.views else 5, max_num_batched_tokens=32)
    assert engine.ask(asked, 3 * NUM_OUTPUT) == expected
    assert engine.core.scheduler.counters.num_preemptions > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_that_cannot_be_encoded_fails_its_request_alone(
    family: MediaFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subject_of(family)
    engine, _ = make_engine(family)
    encode, failures = MediaDecoder.encode, [RuntimeError("out of memory")]

    def fails_once(model: MediaDecoder, images: Sequence[ImageInput]) -> list[torch.Tensor]:
        if failures:
            raise failures.pop()
        return encode(model, images)

    monkeypatch.setattr(MediaDecoder, "encode", fails_once)
    wrong, text = engine.add(subject.prompts[0]), engine.add(subject.prompts[2])
    engine.run()
    assert list(engine.errors) == [wrong]
    assert tuple(engine.tokens[text]) == subject.answers[2]
    assert engine.ask([subject.prompts[0]]) == [list(subject.answers[0])]


@pytest.mark.parametrize(("family", "eager"), WORKERS)
def test_no_step_waits_for_the_device(family: MediaFamily, eager: bool) -> None:
    subject = subject_of(family)
    for limits in ({}, {"max_num_batched_tokens": 11}):
        engine, _ = make_engine(family, eager, around=refuse_synchronization, **limits)
        assert engine.ask(subject.prompts) == answers_of(subject)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_no_request_waits_for_a_kernel_that_is_compiled(
    family: MediaFamily, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subject_of(family)
    started(family, False, dtype)
    compiled: list[str] = []

    def listen(*, src: triton.compiler.ASTSource, **_: object) -> None:
        compiled.append(src.name)

    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    for limits in ({}, {"max_num_batched_tokens": 11}):
        engine, _ = make_engine(family, False, dtype, **limits)
        engine.ask([*subject.prompts, *prompts_of(subject, GRIDS)])
    assert compiled == []


def prompts_of(subject: Subject, grids: Sequence[tuple[int, int, int]]) -> list[MediaPrompt]:
    """One with an image of each size."""
    images = [random_image(subject.media, grid, seed) for seed, grid in enumerate(grids)]
    placeholder = subject.media.image_token_id
    counts = [num_placeholders(subject.media, image) for image in images]
    return [
        MediaPrompt([5, *[placeholder] * count, 7], [(1, image)]) for image, count in zip(images, counts, strict=True)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_agrees_with_float32_where_the_answer_is_clear(family: MediaFamily) -> None:
    subject = subject_of(family)
    reference = Reference(cached_tiny_media_model(family), subject.media)
    prompts = [*subject.prompts, *prompts_of(subject, GRIDS)]
    engine, _ = make_engine(family, False, "bfloat16")
    first = [tokens[0] for tokens in engine.ask(prompts, 1)]
    top = [reference.logits(text)[-1].topk(2) for text in prompts]
    clear = [float(each.values[0] - each.values[1]) > 0.2 for each in top]
    assert sum(clear) >= len(clear) // 2
    wrong = [index for index, each in enumerate(top) if clear[index] and int(each.indices[0]) != first[index]]
    assert wrong == []


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.15)])
@pytest.mark.parametrize("family", FAMILIES)
def test_encoders_equal_transformers(family: MediaFamily, dtype: str, tolerance: float) -> None:
    folder = cached_tiny_media_model(family)
    media = model_config(folder).media
    assert media is not None
    model = load_model(model_config(folder, dtype=dtype), CUDA)
    assert isinstance(model, MediaDecoder)
    images = [random_image(media, grid, seed) for seed, grid in enumerate(GRIDS)]
    expected = Reference(folder, media).encode(images)
    for together in (model.encode(images), [model.encode([image])[0] for image in images]):
        for ours, theirs in zip(together, expected, strict=True):
            assert ours.is_cuda
            assert ours.dtype == getattr(torch, dtype)
            error = (ours.float().cpu() - theirs).abs()
            assert error.mean() < tolerance * 0.3
            assert error.max() < tolerance * (1 if dtype == "float32" else 4)


@pytest.mark.parametrize("head_dim", [16, 64, 72, 80])
@pytest.mark.parametrize("lengths", [[4], [64] * 9, [3, 5, 5, 16, 1, 700], [2500, 4, 64, 64, 32]])
def test_packed_attention(lengths: list[int], head_dim: int) -> None:
    runs = PackedRuns(lengths, CUDA, torch.bfloat16)
    assert runs._bounds is not None, "torch has packed attention"
    qkv = torch.randn(sum(lengths), 3, 4, head_dim, device=CUDA, dtype=torch.bfloat16)
    q, k, v = qkv.unbind(1)
    with torch.inference_mode(), refuse_synchronization():
        attended = runs.attend(q, k, v)
    grouped = PackedRuns(lengths, CUDA).attend(q.float(), k.float(), v.float())
    parts = [part.float().transpose(0, 1) for part in (q, k, v)]
    exact = torch.cat(
        [
            F.scaled_dot_product_attention(*(part[:, first : first + count] for part in parts)).transpose(0, 1)
            for first, count in zip(np.cumsum([0, *lengths[:-1]]).tolist(), lengths, strict=True)
        ]
    ).flatten(1)
    torch.testing.assert_close(grouped, exact, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(attended.float(), exact, atol=2e-2, rtol=2e-2)


def test_memory_for_images_is_left_out_of_the_cache() -> None:
    """A GiB of encoder outputs, unless nobody wants that."""
    started("qwen2_vl", False)
    kept_tokens, kept_bytes = 1 << 22, 1 << 30
    sizes = []
    for skips in (True, False):
        config = engine_config("qwen2_vl", gpu_memory_utilization=0.2, skip_mm_profiling=skips)
        scheduler = dataclasses.replace(config.scheduler, encoder_cache_tokens=kept_tokens)
        worker = Worker(dataclasses.replace(config, scheduler=scheduler))
        sizes.append(worker.initialize().kv_cache_bytes)
        worker.close()
        del worker
        torch.cuda.empty_cache()
    assert config.model.architecture.hidden_size * 4 * kept_tokens == kept_bytes
    assert 0.9 * kept_bytes < sizes[0] - sizes[1] < 2 * kept_bytes


def test_images_that_differ_are_told_apart() -> None:
    """The same tokens with another image of the same size are another prompt, and an equal one is the same."""
    subject = subject_of("qwen2_5_vl")
    engine, _ = make_engine("qwen2_5_vl")
    asked = subject.prompts[5]
    offset, image = asked.images[0]
    other = MediaPrompt(asked.tokens, [(offset, random_image(subject.media, image.grid or (1, 4, 4), seed=99))])
    first, second = engine.ask([asked, other])
    again = engine.add(asked, media=items_of(subject.media, asked))
    engine.run()
    assert tuple(first) == subject.answers[5]
    assert second != first
    assert engine.tokens[again] == first
