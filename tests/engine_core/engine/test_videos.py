"""Answers about videos do not depend on how the work is cut, and are those of transformers."""

import dataclasses
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from tests.support.image_engine import ImageEngine, image_config
from tests.support.media_forward import MediaPrompt, Reference, VideoInput, prompt, random_image, random_video
from tests.support.model_loading import model_config
from tests.support.tiny_media_models import MediaFamily, cached_tiny_media_model
from tokenmill_engine.config.engine import SchedulerConfig
from tokenmill_engine.config.media import MediaConfig

pytestmark = pytest.mark.slow

NUM_OUTPUT = 8
FAMILIES: tuple[MediaFamily, ...] = ("llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def film(media: MediaConfig, num_frames: int, height: int, width: int, seed: int) -> list[int | VideoInput]:
    """Parts of a prompt: a video, or its frames with text between them."""
    if media.views is not None:
        return [random_video(media, (num_frames, media.views.view_size, media.views.view_size), seed)]
    if media.frames_apart:
        frames = [random_video(media, (1, height, width), seed + frame) for frame in range(num_frames)]
        return [part for frame in frames for part in (3, frame)]
    seconds = 0.5 if media.tokens_per_second is not None else None
    return [random_video(media, (num_frames, height, width), seed, seconds)]


def reversed_films(text: MediaPrompt) -> MediaPrompt:
    """The same prompt with the patches of every video from the last to the first."""
    images = [
        (offset, dataclasses.replace(image, pixel_values=torch.flip(image.pixel_values, (0,))))
        for offset, image in text.images
    ]
    return MediaPrompt(text.tokens, images)


@cache
def prompts_of(family: MediaFamily) -> tuple[list[MediaPrompt], list[list[int]]]:
    """Prompts with videos, and what transformers answers."""
    folder = cached_tiny_media_model(family)
    media = model_config(folder).media
    assert media is not None
    first = prompt(media, [4, *film(media, 3, 4, 6, seed=0), 2], seed=1)
    prompts = [
        first,
        prompt(media, [2, random_image(media, (1, 4, 4), 9), 3, *film(media, 2, 6, 2, seed=20), 4], seed=2),
        prompt(media, [6], seed=3),
        reversed_films(first),
    ]
    reference = Reference(folder, media)
    answers = [reference.greedy(text, NUM_OUTPUT) for text in prompts]
    assert answers[0] != answers[3]
    return prompts, answers


@pytest.fixture
def engines() -> Iterator[list[ImageEngine]]:
    started: list[ImageEngine] = []
    yield started
    for engine in started:
        engine.core.shutdown()


@pytest.mark.parametrize("num_batched_tokens", [512, 7])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_transformers(
    family: MediaFamily, num_batched_tokens: int, engines: list[ImageEngine]
) -> None:
    prompts, answers = prompts_of(family)
    scheduling = SchedulerConfig(explicit_budget=True, max_num_batched_tokens=num_batched_tokens)
    engine = ImageEngine(image_config(cached_tiny_media_model(family), scheduling))
    engines.append(engine)
    for _ in range(2):  # The second time from the prefix cache.
        assert engine.ask(prompts) == answers
    assert any(engine.cached.values())
