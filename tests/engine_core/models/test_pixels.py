"""What pixels of a byte become on the encoder's device, against numpy."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.support.media_forward import random_image, tensors_of
from tests.support.media_items import LLAVA, QWEN, VALUES, array_of, make_pixels, seen_values, with_values
from tests.support.model_loading import load_on_cpu, model_config
from tests.support.tiny_media_models import MediaFamily, cached_tiny_media_model
from tokenmill_engine.models.media_decoder import MediaDecoder
from tokenmill_engine.models.vision.encoder import ImageInput
from tokenmill_engine.models.vision.pixels import pixel_values

TABLE = torch.from_numpy(VALUES)


def pixels(*shape: int) -> torch.Tensor:
    return torch.from_numpy(array_of(make_pixels(shape)).copy())


@pytest.mark.parametrize("shape", [(3, 8, 8), (3, 1, 7)])
def test_of_a_tower(shape: tuple[int, ...]) -> None:
    found = pixel_values(pixels(*shape), TABLE, LLAVA.vision)
    assert found.dtype == torch.float32
    assert np.array_equal(found, seen_values(with_values(make_pixels(shape))))


def test_of_several_crops_at_once() -> None:
    crops = pixels(4, 3, 8, 8)
    expected = torch.stack([pixel_values(crop, TABLE, LLAVA.vision) for crop in crops])
    assert torch.equal(pixel_values(crops, TABLE, LLAVA.vision), expected)


@pytest.mark.parametrize("num_patches", [1, 17])
def test_the_frames_of_a_patch_repeat_an_image(num_patches: int) -> None:
    found = pixel_values(pixels(num_patches, 12), TABLE, QWEN.vision)
    assert np.array_equal(found, seen_values(with_values(make_pixels((num_patches, 12))), times=2))


def test_patches_with_frames_of_their_own() -> None:
    found = pixel_values(pixels(5, 24), TABLE, QWEN.vision)
    assert np.array_equal(found, seen_values(with_values(make_pixels((5, 24)))))
    still = dataclasses.replace(QWEN.vision, temporal_patch_size=1)
    found = pixel_values(pixels(5, 12), TABLE, still)
    assert np.array_equal(found, seen_values(with_values(make_pixels((5, 12)))))


def test_what_is_no_image_is_refused() -> None:
    for shape in ((5, 11), (5, 36), (12,), (5, 2, 6)):
        with pytest.raises(ValueError, match="12 or 24 pixels"):
            pixel_values(pixels(*shape), TABLE, QWEN.vision)
    for shape in ((8, 8), (4, 8, 8)):
        with pytest.raises(ValueError, match="pixels of an image"):
            pixel_values(pixels(*shape), TABLE, LLAVA.vision)
    with pytest.raises(ValueError, match=r"\[3, 256\]"):
        pixel_values(pixels(5, 12), TABLE[:, :255], QWEN.vision)


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_encoders_see_the_same_either_way(family: MediaFamily) -> None:
    folder = cached_tiny_media_model(family)
    model, media = load_on_cpu(folder), model_config(folder).media
    assert isinstance(model, MediaDecoder)
    assert media is not None
    image = random_image(media, (1, 4, 6), seed=3)
    tensors = {name: torch.from_numpy(array_of(each).copy()) for name, each in tensors_of(image).items()}
    sent = ImageInput(tensors["pixel_values"], image.grid, tensors["values"])
    assert torch.equal(model.encode([sent, sent])[1], model.encode([image, image])[1])
