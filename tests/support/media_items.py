"""Images of made-up content, as a front end would send them."""

import hashlib
from dataclasses import replace

import numpy as np

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


def media_key(content: str) -> bytes:
    return hashlib.sha256(content.encode()).digest()


def make_tensor(shape: tuple[int, ...], seed: int = 0) -> MediaTensor:
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return MediaTensor("float32", shape, values.astype("<f4").tobytes())


def qwen_item(content: str, offset: int, height: int = 2, width: int = 2) -> MediaItem:
    """An image of `height` x `width` placeholders."""
    grid = (1, 2 * height, 2 * width)
    pixels = make_tensor((4 * height * width, QWEN.vision.patch_dim), seed=media_key(content)[0])
    return MediaItem("image", media_key(content), offset, height * width, grid, {"pixel_values": pixels})


def video_item(content: str, offset: int, frames: int = 2, seconds: float | None = None) -> MediaItem:
    """A video of `frames` x 2 placeholders."""
    grid = (frames, 2, 4)
    pixels = make_tensor((8 * frames, QWEN.vision.patch_dim), seed=media_key(content)[0])
    return MediaItem("video", media_key(content), offset, 2 * frames, grid, {"pixel_values": pixels}, seconds)


def llava_item(content: str, offset: int) -> MediaItem:
    pixels = make_tensor((3, 8, 8), seed=media_key(content)[0])
    return MediaItem("image", media_key(content), offset, 4, None, {"pixel_values": pixels})
