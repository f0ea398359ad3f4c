"""Images for tests, and files of them."""

import base64
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tokenmill_server.multimodal.decode import Picture


def noise(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """[height, width, 3], random."""
    return np.random.default_rng([seed, height, width]).integers(0, 256, (height, width, 3), np.uint8)


def encoded(image: Image.Image | NDArray[Any], kind: str = "PNG", **options: Any) -> bytes:
    """The file of an image."""
    stream = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(stream, kind, **options)
    return stream.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def picture_url(height: int, width: int, seed: int = 0) -> str:
    """A random image, as a data: address."""
    return data_url(encoded(noise(height, width, seed)))


def picture(pixels: NDArray[np.uint8]) -> Picture:
    """As if it had been decoded: uint8 [height, width, 3]."""
    return Picture(Image.fromarray(np.ascontiguousarray(pixels)))
