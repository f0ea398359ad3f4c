"""Answers about images do not depend on how the work is cut, and are those of transformers."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest

from tests.support.image_engine import ImageEngine, image_config, items_of
from tests.support.media_forward import MediaPrompt, Reference, prompt, random_image
from tests.support.model_loading import model_config
from tests.support.tiny_media_models import MediaFamily, cached_tiny_media_model
from tokenmill_engine.config.engine import SchedulerConfig
from tokenmill_engine.config.media import MediaConfig

pytestmark = pytest.mark.slow

FAMILIES: tuple[MediaFamily, ...] = ("llava", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
NUM_OUTPUT = 8
SETTINGS = {
    "all-at-once": SchedulerConfig(explicit_budget=True, max_num_batched_tokens=512),
    "small-chunks": SchedulerConfig(explicit_budget=True, max_num_batched_tokens=5),
    "small-chunks-one-by-one": SchedulerConfig(
        explicit_budget=True, max_num_batched_tokens=7, async_scheduling=False
    ),
    "small-cache": SchedulerConfig(
        explicit_budget=True, max_num_batched_tokens=32, max_num_encoder_tokens=16, encoder_cache_tokens=12
    ),
    "whole-images": SchedulerConfig(
        explicit_budget=True, max_num_batched_tokens=16, disable_chunked_mm_input=True
    ),
}  # fmt: skip
LARGER_SETTINGS = {
    "small-cache": dataclasses.replace(SETTINGS["small-cache"], max_num_encoder_tokens=36, encoder_cache_tokens=34),
    "whole-images": dataclasses.replace(SETTINGS["whole-images"], max_num_batched_tokens=32),
}
"""For models whose images take more tokens."""


@dataclass(frozen=True)
class Subject:
    """A model, prompts, and what transformers answers."""

    family: MediaFamily
    media: MediaConfig
    prompts: tuple[MediaPrompt, ...]
    answers: tuple[tuple[int, ...], ...]

    def engine(self, setting: str = "all-at-once", **changes: int) -> ImageEngine:
        scheduling = SETTINGS[setting]
        if self.family == "llava_onevision":
            scheduling = LARGER_SETTINGS.get(setting, scheduling)
        return ImageEngine(image_config(cached_tiny_media_model(self.family), scheduling, **changes))


@cache
def subject_of(family: MediaFamily) -> Subject:
    folder = cached_tiny_media_model(family)
    media = model_config(folder).media
    assert media is not None
    wide, high, square = (
        random_image(media, grid, seed) for seed, grid in enumerate(((1, 4, 6), (1, 10, 2), (1, 4, 4)))
    )
    prompts = (
        prompt(media, [5, wide, 4]),
        prompt(media, [3, wide, 6, high, 2, square, 1], seed=1),
        prompt(media, [9], seed=2),
        prompt(media, [4, high, 1, wide, 7], seed=3),
        prompt(media, [4, wide, 1, high, 7], seed=3),
        prompt(media, [square, 20], seed=4),
        prompt(media, [2, wide, 1, wide, 1, wide], seed=5),
    )  # fmt: skip
    reference = Reference(folder, media)
    return Subject(family, media, prompts, tuple(tuple(reference.greedy(each, NUM_OUTPUT)) for each in prompts))


@pytest.fixture(params=FAMILIES)
def subject(request: pytest.FixtureRequest) -> Subject:
    return subject_of(request.param)


@pytest.fixture
def engines() -> Iterator[list[ImageEngine]]:
    started: list[ImageEngine] = []
    yield started
    for engine in started:
        engine.core.shutdown()


@pytest.mark.parametrize("setting", SETTINGS)
def test_answers_are_those_of_transformers(subject: Subject, engines: list[ImageEngine], setting: str) -> None:
    engine = subject.engine(setting)
    engines.append(engine)
    for _ in range(2):  # The second time from the prefix cache.
        assert [tuple(answer) for answer in engine.ask(subject.prompts)] == list(subject.answers)
    assert any(engine.cached.values())


def test_choices_and_later_requests_share_what_was_computed(subject: Subject, engines: list[ImageEngine]) -> None:
    engine = subject.engine()
    engines.append(engine)
    asked, answer = subject.prompts[1], list(subject.answers[1])
    assert engine.ask([asked] * 3) == [answer] * 3
    later = engine.add(asked)
    other = engine.add(MediaPrompt(asked.tokens, list(asked.images)), media=items_of(subject.media, asked))
    engine.run()
    assert engine.tokens[later] == engine.tokens[other] == answer
    assert engine.cached[later] == engine.cached[other] > len(asked.tokens) // 2


def test_an_image_is_looked_at_and_not_mistaken(subject: Subject, engines: list[ImageEngine]) -> None:
    """The same tokens with another image are another prompt, also for the prefix cache."""
    engine = subject.engine()
    engines.append(engine)
    asked = subject.prompts[5]
    offset, image = asked.images[0]
    other = random_image(subject.media, image.grid or (1, 4, 4), seed=99)
    first, second = engine.ask([asked])[0], engine.ask([MediaPrompt(asked.tokens, [(offset, other)])])[0]
    assert tuple(first) == subject.answers[5]
    assert first != second
    assert list(engine.cached.values()) == [0, 0]


def test_preempted_requests_are_answered_the_same(subject: Subject, engines: list[ImageEngine]) -> None:
    engine = subject.engine("small-cache", num_blocks=17 if subject.media.views is not None else 12)
    engines.append(engine)
    order = (0, 5, 2, 0, 5, 2)
    asked = [subject.prompts[index] for index in order]
    expected = [list(subject.answers[index]) for index in order]
    assert engine.ask(asked, NUM_OUTPUT) == expected
    assert engine.core.scheduler.counters.num_preemptions > 0


def test_what_the_model_cannot_take_fails_alone(subject: Subject, engines: list[ImageEngine]) -> None:
    engine = subject.engine()
    engines.append(engine)
    good, bad = subject.prompts[0], subject.prompts[1]
    wrong = engine.add(bad, media=items_of(subject.media, good))
    right = engine.add(good)
    engine.run()
    assert tuple(engine.tokens[right]) == subject.answers[0]
    assert list(engine.errors) == [wrong]
    assert "image 0" in (engine.errors[wrong] or "")
