"""Prepared media of made-up content, and a loader that can be watched."""

import threading
from dataclasses import replace
from pathlib import Path

from PIL import Image

from tests.support.tiny_media_models import cached_tiny_media_model
from tokenmill_engine.config.model_files import resolve_model
from tokenmill_engine.media_store import media_bytes
from tokenmill_engine.messages import MediaTensor
from tokenmill_server.multimodal.decode import Picture
from tokenmill_server.multimodal.image_options import read_image_options
from tokenmill_server.multimodal.items import PreparedItem
from tokenmill_server.multimodal.parts import ImageSource
from tokenmill_server.multimodal.processor import Detail, ImageProcessor
from tokenmill_server.multimodal.processor_kwargs import ProcessorKwargs


def made_up(number: int, num_bytes: int = 1000) -> PreparedItem:
    """An image of 4 tokens; its key and its bytes are its number."""
    data = bytes([number % 256]) * num_bytes
    tensors = {"pixel_values": MediaTensor("uint8", (num_bytes,), data)}
    return PreparedItem("image", number.to_bytes(32, "big"), 4, (1, 4, 4), tensors)


MADE_UP_BYTES = media_bytes(made_up(0).tensors)


class WatchedProcessor(ImageProcessor):
    """Of the tiny Qwen2-VL, for images of up to a megapixel. Remembers the threads it works in: one for each image that
    it prepares."""

    def __init__(self) -> None:
        folder = Path(cached_tiny_media_model("qwen2_vl"))
        media = resolve_model(str(folder)).media
        assert media is not None
        super().__init__(media, replace(read_image_options(folder, media), max_pixels=1_000_000))
        self.threads: list[threading.Thread] = []

    def prepare(
        self, picture: Picture, detail: Detail = "auto", key: bytes | None = None, *said: ProcessorKwargs
    ) -> PreparedItem:
        self.threads.append(threading.current_thread())
        return super().prepare(picture, detail, key, *said)


def source(
    image: str | Image.Image | None, index: int = 0, detail: Detail = "auto", uuid: str | None = None
) -> ImageSource:
    return ImageSource(image, detail, f"image {index}", uuid)
