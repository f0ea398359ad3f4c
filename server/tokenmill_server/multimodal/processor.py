"""From pixels to what a vision encoder takes: bit for bit what transformers' image processors (those with Pillow) give,
with numpy and Pillow alone, since those would bring torch into the API server.

Rescaling and normalizing turn each of the 256 values of a channel into one number, whatever the image: the engine gets
pixels of one byte and these numbers, and looks them up where the encoder is.
"""

import math
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tokenmill_engine.config.media import MediaConfig
from tokenmill_server.multimodal.bands import on_canvas, resized
from tokenmill_server.multimodal.decode import Picture
from tokenmill_server.multimodal.errors import MediaError
from tokenmill_server.multimodal.image_options import ImageOptions
from tokenmill_server.multimodal.items import PreparedItem, media_tensor
from tokenmill_server.multimodal.keys import media_key
from tokenmill_server.multimodal.processor_kwargs import NOTHING_SAID, ProcessorKwargs
from tokenmill_server.multimodal.settings import MediaSettings
from tokenmill_server.multimodal.views import cut_views

Detail = Literal["auto", "low", "high"]
Pixels = NDArray[np.uint8]
Floats = NDArray[np.float32]

MAX_ASPECT_RATIO = 200
_BYTES_PER_PIXEL = 16
"""Four each for the image as it is stored, in RGB, and resized; three each for its pixels in rows and in patches. Some
decoders have the whole image a second time."""
_LOW_DETAIL_PIXELS = 512 * 512
_MAX_SQUARE_PIXELS = MediaSettings().max_pixels
"""Of an image that is padded: one of few pixels may be as long as it likes."""


class ImageProcessor:
    """Prepares images for one model."""

    def __init__(self, media: MediaConfig, options: ImageOptions) -> None:
        self.media, self.options = media, options
        """What it was made of: another process may make the same."""
        self._tokens_per_image, self._views = media.vision.tokens_per_image, media.views
        self._values = media_tensor(_value_table(options))
        self._has_sizes = options.method == "qwen2_vl"

    def num_tokens(self, picture: Picture, detail: Detail = "auto", said: ProcessorKwargs = NOTHING_SAID) -> int:
        """How many tokens `prepare` will say, which is quick to know. Raises MediaError as it does."""
        options = self._options_for(detail, said)
        if self._views is not None:
            return self._views.num_rows(*_views_grid(picture.height, picture.width, options))
        if self._tokens_per_image is not None:
            return self._tokens_per_image
        height, width = qwen2_vl_size(picture.height, picture.width, options)
        return height * width // (options.patch_size * options.merge_size) ** 2

    def memory_bytes(self, height: int, width: int) -> int:
        """About what decoding and preparing an image of this size takes at the worst."""
        return _BYTES_PER_PIXEL * self.num_pixels(height, width)

    def num_pixels(self, height: int, width: int) -> int:
        """Of an image of this size, or of the square that it becomes before it is resized."""
        return max(height, width) ** 2 if self.options.pads_to_square else height * width

    def options_text(self, detail: Detail = "auto", said: ProcessorKwargs = NOTHING_SAID) -> str:
        """All that decides, beside the image, what `prepare` makes of it."""
        return self._options_for(detail, said).text()

    def key(self, picture: Picture, detail: Detail = "auto", said: ProcessorKwargs = NOTHING_SAID) -> bytes:
        """The key that `prepare` gives it. Takes about a millisecond for each megabyte of pixels."""
        return media_key(picture, self.options_text(detail, said))

    def prepare(
        self,
        picture: Picture,
        detail: Detail = "auto",
        key: bytes | None = None,
        said: ProcessorKwargs = NOTHING_SAID,
    ) -> PreparedItem:
        """Resizes, and crops or cuts into patches. `detail` low: of a model that takes images of any size at most
        512 x 512 pixels, and of one that sees them in several views the whole alone. `key`: what `key` says of it, if
        that is known. `said`: what counts more than the model's own options. Takes long: call it in a thread.

        Raises MediaError for an image that the model does not take.
        """
        options = self._options_for(detail, said)
        key = key or self.key(picture, detail, said)
        grid: tuple[int, int, int] | None
        if options.method == "qwen2_vl":
            pixels, grid = _patches(picture.image, options)
        elif self._views is not None:
            pixels, grid = _viewed(picture.image, options), _views_grid(picture.height, picture.width, options)
        else:
            pixels, grid = _square(picture.image, options).transpose(2, 0, 1), None
        tensors = {"pixel_values": media_tensor(pixels), "values": self._values}
        return PreparedItem("image", key, self.num_tokens(picture, detail, said), grid, tensors)

    def _options_for(self, detail: Detail, said: ProcessorKwargs) -> ImageOptions:
        options = self.options
        if self._has_sizes and (said.min_pixels is not None or said.max_pixels is not None):
            least = options.min_pixels if said.min_pixels is None else said.min_pixels
            most = options.max_pixels if said.max_pixels is None else said.max_pixels
            options = replace(options, min_pixels=least, max_pixels=most)
        if detail == "low":
            low_pixels = min(options.max_pixels, max(options.min_pixels, _LOW_DETAIL_PIXELS))
            options = replace(options, max_pixels=low_pixels, views=None)
        return options


def _patches(image: Image.Image, options: ImageOptions) -> tuple[Pixels, tuple[int, int, int]]:
    """[num_patches, 3 * patch_size**2], patches that are merged behind each other, and how many patches each way."""
    size, merge = options.patch_size, options.merge_size
    pixels = resized(image, qwen2_vl_size(image.height, image.width, options), options.resample)
    rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
    blocks = pixels.reshape(rows // merge, merge, size, columns // merge, merge, size, 3)
    return blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3 * size**2), (1, rows, columns)


def _viewed(image: Image.Image, options: ImageOptions) -> Pixels:
    """[num_views, 3, size, size]"""
    if options.views is None:
        views = _square(image, options)[None]
    else:
        views = cut_views(image, options.views, options.resample)
    return views.transpose(0, 3, 1, 2)


def _views_grid(height: int, width: int, options: ImageOptions) -> tuple[int, int, int]:
    """Views, and the size of the image itself, which says what of them is padding."""
    return (1 if options.views is None else 1 + options.views.num_tiles(height, width), height, width)


def _square(image: Image.Image, options: ImageOptions) -> Pixels:
    """[height, width, 3] of the one size that the model sees."""
    if options.pads_to_square:
        image = _pad_to_square(image, options.mean)
    if options.shortest_edge is not None:
        size = _shortest_edge_size(image.height, image.width, options.shortest_edge)
    else:
        size = options.size or (image.height, image.width)
    pixels = resized(image, size, options.resample)
    return pixels if options.crop_size is None else _center_crop(pixels, options.crop_size)


def qwen2_vl_size(height: int, width: int, options: ImageOptions) -> tuple[int, int]:
    """(height, width) in whole squares of merged patches, with the image's proportions as far as may be.

    Raises MediaError for proportions that the model does not take.
    """
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise MediaError(
            f"the image has {width} x {height} pixels; one side may be at most {MAX_ASPECT_RATIO} times the other"
        )
    factor = options.patch_size * options.merge_size
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > options.max_pixels:
        shrink = math.sqrt((height * width) / options.max_pixels)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif rows * columns < options.min_pixels:
        grow = math.sqrt(options.min_pixels / (height * width))
        rows, columns = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return rows, columns


def _value_table(options: ImageOptions) -> Floats:
    """[3, 256]: what each value of each channel becomes. There are so few that none is computed twice."""
    values = np.tile(np.arange(256, dtype=np.float64), (3, 1))
    if options.rescale_factor is not None:
        values = values * options.rescale_factor
    table = values.astype(np.float32)
    if options.mean is not None and options.std is not None:
        mean, std = (np.array(each, np.float32)[:, None] for each in (options.mean, options.std))
        table = (table - mean) / std
    return table


def _shortest_edge_size(height: int, width: int, edge: int) -> tuple[int, int]:
    short, long = min(height, width), max(height, width)
    other = int(edge * long / short)
    if other > edge * MAX_ASPECT_RATIO:
        raise MediaError(
            f"the image has {width} x {height} pixels; one side may be at most {MAX_ASPECT_RATIO} times the other"
        )
    return (other, edge) if width <= height else (edge, other)


def _center_crop(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """The middle; a side that is too short gets black beside it."""
    height, width = pixels.shape[:2]
    below, right = max(0, size[0] - height), max(0, size[1] - width)
    if below or right:
        above, left = math.ceil(below / 2), math.ceil(right / 2)
        pixels = np.pad(pixels, ((above, below - above), (left, right - left), (0, 0)))
        height, width = pixels.shape[:2]
    top, start = (height - size[0]) // 2, (width - size[1]) // 2
    return pixels[top : top + size[0], start : start + size[1]]


def _pad_to_square(image: Image.Image, mean: tuple[float, float, float] | None) -> Image.Image:
    width, height = image.size
    if height == width:
        return image
    side = max(height, width)
    if side**2 > _MAX_SQUARE_PIXELS:
        raise MediaError(
            f"the image has {width} x {height} pixels; the square that the model sees would have {side**2}, more than "
            f"the limit of {_MAX_SQUARE_PIXELS}"
        )
    colour = (0, 0, 0) if mean is None else tuple(int(value * 255) for value in mean)
    return on_canvas(image, (side, side), ((side - width) // 2, (side - height) // 2), colour)
