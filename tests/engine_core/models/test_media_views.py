"""Videos and images in one view in LLaVA-OneVision, against transformers in float32 on CPU. What it shares with other
models: test_media_decoder.py."""

import dataclasses

import pytest
import torch

from tests.support.media_forward import (
    MediaForward,
    MediaPrompt,
    Reference,
    prompt,
    random_image,
    random_video,
    view_image,
)
from tests.support.model_loading import load_on_cpu, model_config
from tests.support.tiny_media_models import LLAVA_IMAGE_SIZE, cached_tiny_media_model
from tokenmill_engine.config.media import MediaConfig
from tokenmill_engine.models.media_decoder import MediaDecoder
from tokenmill_engine.models.vision.encoder import ImageInput

TOLERANCE = 1e-4
FOLDER = cached_tiny_media_model("llava_onevision")


def media_config() -> MediaConfig:
    media = model_config(FOLDER).media
    assert media is not None
    return media


MEDIA = media_config()
FRAME = (LLAVA_IMAGE_SIZE, LLAVA_IMAGE_SIZE)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(FOLDER, MEDIA)


@pytest.fixture
def model() -> MediaDecoder:
    loaded = load_on_cpu(FOLDER)
    assert isinstance(loaded, MediaDecoder)
    return loaded


def check(model: MediaDecoder, reference: Reference, text: MediaPrompt) -> torch.Tensor:
    """Logits in chunks, which are transformers'."""
    forward = MediaForward(model, MEDIA, {"a": text}, block_size=4)
    sizes = [min(7, len(text.tokens) - first) for first in range(0, len(text.tokens), 7)]
    logits = torch.cat([forward.step([forward.chunk("a", size)])["a"] for size in sizes])
    torch.testing.assert_close(logits, reference.logits(text), atol=TOLERANCE, rtol=TOLERANCE)
    return logits


def test_several_images_are_seen_in_one_view_each(model: MediaDecoder, reference: Reference) -> None:
    images = [view_image((1, height, width), height) for height, width in ((30, 50), (24, 24), (90, 20))]
    assert check(model, reference, prompt(MEDIA, [3, images[0], 2, images[1], images[2], 4])).std() > 0.5


@pytest.mark.parametrize("num_frames", [1, 2, 20])
def test_videos(model: MediaDecoder, reference: Reference, num_frames: int) -> None:
    video = random_video(MEDIA, (num_frames, *FRAME), seed=num_frames)
    assert check(model, reference, prompt(MEDIA, [3, video, 4])).std() > 0.5


def test_videos_beside_an_image(model: MediaDecoder, reference: Reference) -> None:
    videos = [random_video(MEDIA, (3, *FRAME), seed) for seed in range(2)]
    check(model, reference, prompt(MEDIA, [3, videos[0], 2, random_image(MEDIA, (1, 6, 4), 5), 3, videos[1], 2]))


def test_frames_in_another_order_give_other_rows(model: MediaDecoder) -> None:
    video = random_video(MEDIA, (2, *FRAME), 0)
    turned = dataclasses.replace(video, pixel_values=video.pixel_values.flip(0))
    first, second = model.encode([video, turned])
    assert torch.equal(first[-1], second[-1])
    torch.testing.assert_close(first[:4], second[4:8])
    assert (first[:4] - second[:4]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("grid", "is_video"), [((2, 30, 30), True), ((3, 24, 24), False), ((0, 24, 24), False), (None, False)]
)
def test_views_that_do_not_belong_together_are_refused(
    model: MediaDecoder, grid: tuple[int, int, int] | None, is_video: bool
) -> None:
    pixels = torch.zeros(2, 3, *FRAME)
    with pytest.raises(ValueError, match="grid of"):
        model.encode([ImageInput(pixels, grid, is_video=is_video)])
    with pytest.raises(ValueError, match="2 views have pixels"):
        model.encode([ImageInput(pixels[:1], (2, 24, 24))])
