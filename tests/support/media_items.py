"""Images of made-up content, as a front end would send them."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.config.media import MediaConfig, VisionConfig
from tokenmill_engine.messages import MediaItem, MediaTensor

IMAGE_TOKEN = 50
"""In the vocabulary of the fake executor, too."""

QWEN = MediaConfig(
    kind="qwen2_vl",
    image_token_id=IMAGE_TOKEN,
    vision=VisionConfig(
        kind="qwen2_vl",
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=2,
        patch_size=2,
        output_size=64,
        activation="quick_gelu",
        temporal_patch_size=2,
        spatial_merge_size=2,
    ),
)
VIDEO_TOKEN = 51

WITH_VIDEO = replace(QWEN, takes_video=True, video_token_id=VIDEO_TOKEN)
WITH_TIME = replace(WITH_VIDEO, tokens_per_second=2.0)

LLAVA = MediaConfig(
    kind="llava",
    image_token_id=IMAGE_TOKEN,
    vision=VisionConfig(
        kind="clip",
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=2,
        patch_size=4,
        output_size=64,
        activation="quick_gelu",
        image_size=8,
    ),
)


VALUES = np.array([[(pixel - 128) / 64 + channel / 8 for pixel in range(256)] for channel in range(3)], np.float32)
"""What pixels of made-up images become: exact numbers, other ones in each channel."""


def media_key(content: str) -> bytes:
    return hashlib.sha256(content.encode()).digest()


def tensor_of(values: NDArray[Any]) -> MediaTensor:
    return MediaTensor(values.dtype.name, values.shape, np.ascontiguousarray(values).tobytes())


def array_of(tensor: MediaTensor) -> NDArray[Any]:
    return np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)


def make_pixels(shape: tuple[int, ...], seed: int = 0) -> MediaTensor:
    return tensor_of(np.random.default_rng(seed).integers(0, 256, shape, np.uint8))


def with_values(pixels: MediaTensor) -> dict[str, MediaTensor]:
    """Tensors of an item with these pixels."""
    return {"pixel_values": pixels, "values": tensor_of(VALUES)}


def seen_values(tensors: Mapping[str, MediaTensor], times: int = 1) -> NDArray[np.float32]:
    """What an encoder sees of an item, in numpy: of patches, each is `times` times there."""
    pixels, values = (array_of(tensors[name]) for name in ("pixel_values", "values"))
    if pixels.ndim >= 3:
        return np.stack([values[channel][pixels[..., channel, :, :]] for channel in range(3)], axis=-3)
    patches = pixels.reshape(len(pixels), 3, -1)
    channels = [np.tile(values[channel][patches[:, channel]], times) for channel in range(3)]
    return np.concatenate(channels, axis=1)


def qwen_item(content: str, offset: int, height: int = 2, width: int = 2) -> MediaItem:
    """An image of `height` x `width` placeholders."""
    grid = (1, 2 * height, 2 * width)
    pixels = make_pixels((4 * height * width, QWEN.vision.image_patch_dim), seed=media_key(content)[0])
    return MediaItem("image", media_key(content), offset, height * width, grid, with_values(pixels))


def video_item(content: str, offset: int, frames: int = 2, seconds: float | None = None) -> MediaItem:
    """A video of `frames` x 2 placeholders."""
    grid = (frames, 2, 4)
    pixels = make_pixels((8 * frames, QWEN.vision.patch_dim), seed=media_key(content)[0])
    return MediaItem("video", media_key(content), offset, 2 * frames, grid, with_values(pixels), seconds)


def llava_item(content: str, offset: int) -> MediaItem:
    pixels = make_pixels((3, 8, 8), seed=media_key(content)[0])
    return MediaItem("image", media_key(content), offset, 4, None, with_values(pixels))
