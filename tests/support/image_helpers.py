"""What tests of the processes for large images share."""

from pathlib import Path
from typing import Any

import psutil

from tests.support.pictures import encoded, noise
from tests.support.processes import children_with
from tests.support.tiny_media_models import cached_tiny_media_model
from tokenmill_engine.config.model_files import resolve_model
from tokenmill_server.multimodal.asking import Asking
from tokenmill_server.multimodal.decoding_memory import DecodingMemory
from tokenmill_server.multimodal.image_item import WantedImage
from tokenmill_server.multimodal.image_options import read_image_options
from tokenmill_server.multimodal.image_preparer import ImagePreparer
from tokenmill_server.multimodal.items import PreparedItem
from tokenmill_server.multimodal.processor import ImageProcessor
from tokenmill_server.multimodal.processor_kwargs import NOTHING_SAID
from tokenmill_server.multimodal.settings import MediaSettings

PLAIN = WantedImage("auto", NOTHING_SAID)
FILE = encoded(noise(60, 90))


def processor_of(kind: str = "qwen2_vl") -> ImageProcessor:
    folder = cached_tiny_media_model(kind)
    media = resolve_model(str(folder)).media
    assert media is not None
    return ImageProcessor(media, read_image_options(Path(folder), media))


def helpers() -> list[psutil.Process]:
    """The processes that prepare images for this one."""
    return children_with("image_child")


def nothing(*_arguments: object) -> None:
    """Admits everything, reserves and finds nothing."""


ASKING = Asking(nothing, nothing)
"""Of one that is wanted, and not known."""


def in_thread(processor: ImageProcessor, data: bytes = FILE, wanted: WantedImage = PLAIN) -> PreparedItem:
    return preparer(processor, image_processes=0).prepare(wanted, data, ASKING)


def preparer(processor: ImageProcessor, **settings: Any) -> ImagePreparer:
    media = MediaSettings(**settings)
    return ImagePreparer(processor, media, DecodingMemory(media.memory_bytes))
