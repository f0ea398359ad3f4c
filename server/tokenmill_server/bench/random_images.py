"""Random images for the load generator: their sizes, how many a request has, and which are seen again.

Pictures are noise drawn at a quarter of their size with coarser noise below, so that files have about as many bytes per
pixel as photographs. Those of one seed are the same on every machine with the same Pillow.
"""

import base64
import io
import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image

Size = tuple[int, int]
"""(width, height)."""
Format = Literal["jpeg", "png"]

_SIZE = re.compile(r"(\d+)x(\d+)")
_MOST_PIXELS = 178_956_970
_JPEG_QUALITY = 90
_FINE, _COARSE = 4, 32
"""A picture's pixels for one of its noise."""
_COARSE_SHARE = 0.7


@dataclass(slots=True, frozen=True)
class SizeRange:
    """Width and height, each drawn evenly on a logarithmic scale between two sizes; of equal ones there is one size."""

    smallest: Size
    largest: Size
    weight: float = 1.0
    """How often, beside other ranges."""

    def draw(self, rng: np.random.Generator) -> Size:
        low, high = np.log(self.smallest), np.log(self.largest)
        width, height = np.rint(np.exp(rng.uniform(low, high))).astype(int).tolist()
        return width, height

    def divided(self, divisor: int) -> "SizeRange":
        """With a `divisor`-th of width and height."""
        smallest, largest = (
            (max(1, width // divisor), max(1, height // divisor)) for width, height in (self.smallest, self.largest)
        )
        return SizeRange(smallest, largest, self.weight)

    def __str__(self) -> str:
        ends = [f"{width}x{height}" for width, height in (self.smallest, self.largest)]
        return "..".join(dict.fromkeys(ends))


def parse_sizes(text: str) -> tuple[SizeRange, ...]:
    """`256x256,512x512` (each as often), `256x256..2048x2048` (everything between), or both.

    Raises ValueError.
    """
    ranges = []
    for part in text.split(","):
        first, dots, second = part.strip().partition("..")
        smallest = _parse_size(first)
        largest = _parse_size(second) if dots else smallest
        if smallest[0] > largest[0] or smallest[1] > largest[1]:
            raise ValueError(f"{part} begins with the larger size")
        ranges.append(SizeRange(smallest, largest))
    return tuple(ranges)


def _parse_size(text: str) -> Size:
    match = _SIZE.fullmatch(text)
    width, height = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 0 < width * height <= _MOST_PIXELS:
        raise ValueError(f"{text!r} is no size such as 640x480")
    return width, height


@dataclass(slots=True, frozen=True)
class ImageShape:
    """The images of a workload."""

    sizes: tuple[SizeRange, ...]
    num_per_request: int = 1
    range_ratio: float = 0.0
    """Numbers are drawn evenly from [num * (1 - ratio), num * (1 + ratio)]."""
    repeat_share: float = 0.0
    """Share of images, but the first, that are one of those before, drawn evenly."""
    format: Format = "jpeg"


@dataclass(slots=True, frozen=True)
class RandomImage:
    """One image as it is sent. Images that are seen again are one object."""

    url: str
    """`data:` address."""
    size: Size
    num_file_bytes: int


def draw_images(shape: ImageShape, num_requests: int, seed: int) -> list[list[RandomImage]]:
    """Images of each request. Takes every core for a while."""
    rng = np.random.default_rng(seed)
    low = math.floor(shape.num_per_request * (1 - shape.range_ratio))
    high = math.ceil(shape.num_per_request * (1 + shape.range_ratio))
    weights = np.asarray([each.weight for each in shape.sizes])
    sizes: list[Size] = []
    chosen: list[list[int]] = []
    for _ in range(num_requests):
        numbers = []
        for _ in range(int(rng.integers(low, high + 1))):
            if sizes and rng.random() < shape.repeat_share:
                numbers.append(int(rng.integers(len(sizes))))
            else:
                sizes.append(shape.sizes[rng.choice(len(weights), p=weights / weights.sum())].draw(rng))
                numbers.append(len(sizes) - 1)
        chosen.append(numbers)
    with ThreadPoolExecutor() as threads:
        images = list(threads.map(lambda each: make_image(each[1], (seed, each[0]), shape.format), enumerate(sizes)))
    return [[images[number] for number in numbers] for numbers in chosen]


def make_image(size: Size, seed: int | Sequence[int], file_format: Format = "jpeg") -> RandomImage:
    """One image; equal arguments give equal bytes."""
    rng = np.random.default_rng(seed)
    fine, coarse = (_noise(size, step, rng) for step in (_FINE, _COARSE))
    file = io.BytesIO()
    Image.blend(fine, coarse, _COARSE_SHARE).save(file, file_format.upper(), **_save_options(file_format))
    data = file.getvalue()
    return RandomImage(f"data:image/{file_format};base64,{base64.b64encode(data).decode()}", size, len(data))


def _save_options(file_format: Format) -> dict[str, int]:
    return {"quality": _JPEG_QUALITY} if file_format == "jpeg" else {"compress_level": 1}


def _noise(size: Size, step: int, rng: np.random.Generator) -> Image.Image:
    width, height = (-(-length // step) for length in size)
    values = rng.integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values).resize(size, Image.Resampling.BILINEAR)
