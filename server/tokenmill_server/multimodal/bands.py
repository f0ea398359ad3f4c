"""Pixels out of Pillow's images and into them, a band at a time.

Pillow copies pixels while it holds the interpreter's lock: of 20 megapixels in tens of milliseconds, for which every
stream of the process would wait. A band takes one.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_BAND_PIXELS = 2**18


def bands_of(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Copies of the image's rows, some at a time, from the top; each with the number of its first row."""
    width, height = image.size
    num_rows = max(1, _BAND_PIXELS // width)
    for top in range(0, height, num_rows):
        yield top, image.crop((0, top, width, min(top + num_rows, height)))


def to_array(image: Image.Image) -> NDArray[np.uint8]:
    """uint8 [height, width, 3] of an image in RGB."""
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    for top, band in bands_of(image):
        pixels[top : top + band.height] = np.asarray(band)
    return pixels


def resized(image: Image.Image, size: tuple[int, int], resample: int) -> NDArray[np.uint8]:
    """uint8 [height, width, 3] of an RGB image in (height, width) `size`. `resample`: Pillow's number of a filter."""
    height, width = size
    if image.size == (width, height):
        return to_array(image)
    return to_array(image.resize((width, height), resample=Image.Resampling(resample)))


def to_image(pixels: NDArray[np.uint8]) -> Image.Image:
    """The other way round."""
    height, width = pixels.shape[:2]
    image = Image.new("RGB", (width, height), None)  # not filled yet
    num_rows = max(1, _BAND_PIXELS // width)
    for top in range(0, height, num_rows):
        image.paste(Image.fromarray(pixels[top : top + num_rows]), (0, top))
    return image


def on_canvas(
    image: Image.Image, size: tuple[int, int], place: tuple[int, int], colour: tuple[int, ...]
) -> Image.Image:
    """`image` at (left, top) `place` of an RGB image of (width, height) `size` that has the colour elsewhere."""
    width, height = size
    canvas = Image.new("RGB", size, None)
    num_rows = max(1, _BAND_PIXELS // width)
    empty = Image.new("RGB", (width, num_rows), colour)
    for top in range(0, height, num_rows):
        canvas.paste(empty, (0, top))
    for top, band in bands_of(image):
        canvas.paste(band, (place[0], place[1] + top))
    return canvas
