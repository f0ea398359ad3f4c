"""Pixels out of Pillow's images and into them: the same as all at once."""

import numpy as np
import pytest
from PIL import Image

from tests.support.pictures import noise
from tokenmill_server.multimodal import bands
from tokenmill_server.multimodal.bands import bands_of, on_canvas, to_array, to_image

SIZES = [(1, 1), (7, 5), (40, 9), (3, 200)]


@pytest.fixture(autouse=True, params=[1, 64, 10**6])
def band_pixels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bands, "_BAND_PIXELS", request.param)


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_there_and_back(height: int, width: int) -> None:
    pixels = noise(height, width)
    image = to_image(pixels)
    assert image.size == (width, height)
    assert np.array_equal(np.asarray(image), pixels)
    assert np.array_equal(to_array(image), pixels)
    assert np.array_equal(to_array(to_image(np.asfortranarray(pixels))), pixels)


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_bands_are_the_image(height: int, width: int) -> None:
    image = Image.fromarray(noise(height, width))
    assert b"".join(band.tobytes() for _, band in bands_of(image)) == image.tobytes()
    tops = [top for top, _ in bands_of(image)]
    assert tops == sorted(set(tops))


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_a_canvas_has_the_colour_around_the_image(height: int, width: int) -> None:
    pixels = noise(height, width)
    expected = np.empty((height + 5, width + 30, 3), np.uint8)
    expected[:] = (10, 20, 30)
    expected[2 : 2 + height, 11 : 11 + width] = pixels
    canvas = on_canvas(Image.fromarray(pixels), (width + 30, height + 5), (11, 2), (10, 20, 30))
    assert np.array_equal(np.asarray(canvas), expected)
