"""Videos in models that look at images, against transformers, in float32 on CPU."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.media_forward import MediaForward, MediaPrompt, Reference, prompt, random_image, random_video
from tests.support.model_loading import load_on_cpu, model_config
from tests.support.tiny_media_models import MediaFamily, cached_tiny_media_model
from tokenmill_engine.models.media_decoder import MediaDecoder

TOLERANCE = 1e-4

FAMILIES: tuple[MediaFamily, ...] = ("qwen2_vl", "qwen2_5_vl")


class Subject:
    """One model, ours and theirs."""

    def __init__(self, folder: Path) -> None:
        media = model_config(folder).media
        assert media is not None
        self.folder, self.media, self.reference = folder, media, Reference(folder, media)

    def forward(self, text: MediaPrompt, block_size: int = 16) -> MediaForward:
        model = load_on_cpu(self.folder)
        assert isinstance(model, MediaDecoder)
        return MediaForward(model, self.media, {"a": text}, block_size)

    def seconds(self, value: float) -> float | None:
        return value if self.media.tokens_per_second is not None else None


@pytest.fixture(params=FAMILIES, scope="module")
def subject(request: pytest.FixtureRequest) -> Subject:
    return Subject(cached_tiny_media_model(request.param))


def assert_close(ours: torch.Tensor, reference: torch.Tensor) -> None:
    torch.testing.assert_close(ours, reference, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_video_of_any_length_equals_transformers(subject: Subject) -> None:
    for seed, (frames, seconds) in enumerate(((2, 0.5), (7, 0.3), (3, 2.0))):
        video = random_video(subject.media, (frames, 4, 6), seed, subject.seconds(seconds))
        text = prompt(subject.media, [4, video, 9])
        logits = subject.forward(text).step([("a", text.tokens)])["a"]
        expected = subject.reference.logits(text)
        assert expected.std() > 0.5
        assert_close(logits, expected)


def test_positions_are_those_of_transformers_up_to_the_end_of_the_video(subject: Subject) -> None:
    for frames, seconds in ((2, 0.5), (3, 0.3), (9, 0.7), (4, 3.0)):
        video = random_video(subject.media, (frames, 4, 6), 0, subject.seconds(seconds))
        text = prompt(subject.media, [5, random_image(subject.media, (1, 4, 4), 1), 2, video, 3])
        places, _ = text.positions(subject.media)
        expected, _ = subject.reference.positions(text)
        end = len(text.tokens) - 3
        assert torch.equal(torch.from_numpy(places).long()[:, :end], expected[:, :end])
        assert (places[:, end:] == np.arange(3) + places[:, :end].max() + 1).all()


def test_short_videos_have_the_positions_of_transformers(subject: Subject) -> None:
    video = random_video(subject.media, (2, 4, 6), 0, subject.seconds(0.5))
    text = prompt(subject.media, [5, video, 2, video, 3])
    places, delta = text.positions(subject.media)
    expected, expected_delta = subject.reference.positions(text)
    assert torch.equal(torch.from_numpy(places).long(), expected)
    assert delta == expected_delta


def test_chunks_through_images_and_videos_and_the_tokens_after_them(subject: Subject) -> None:
    media = subject.media
    video, image = random_video(media, (4, 4, 4), 2, subject.seconds(0.5)), random_image(media, (1, 4, 6), 3)
    text = prompt(media, [3, video, 2, image, 5, random_video(media, (2, 6, 2), 4, subject.seconds(1.5)), 4], seed=2)
    forward = subject.forward(text, block_size=4)
    sizes = [min(7, len(text.tokens) - first) for first in range(0, len(text.tokens), 7)]
    pieces = [forward.step([forward.chunk("a", size)])["a"] for size in sizes]
    assert_close(torch.cat(pieces), subject.reference.logits(text))
    chosen = [int(pieces[-1][-1].argmax())]
    for _ in range(5):
        chosen.append(int(forward.step([("a", chosen[-1:])])["a"][-1].argmax()))
    assert chosen == subject.reference.greedy(text, 6)


def test_frames_in_another_order_give_other_logits(subject: Subject) -> None:
    video = random_video(subject.media, (2, 4, 4), 5, subject.seconds(0.5))
    first, second = video.pixel_values.chunk(2)
    swapped = dataclasses.replace(video, pixel_values=torch.cat((second, first)))
    results = []
    for each in (video, swapped):
        text = prompt(subject.media, [3, each, 5], seed=7)
        results.append(subject.forward(text).step([("a", text.tokens)])["a"])
    assert (results[0][-5:] - results[1][-5:]).abs().max() > 0.1
