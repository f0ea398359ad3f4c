"""From a decoded image to a prepared one, in whatever process."""

from dataclasses import dataclass

from tokenmill_server.multimodal.asking import Asking
from tokenmill_server.multimodal.decode import Picture
from tokenmill_server.multimodal.items import PreparedItem
from tokenmill_server.multimodal.processor import Detail, ImageProcessor
from tokenmill_server.multimodal.processor_kwargs import ProcessorKwargs


@dataclass(frozen=True, slots=True)
class WantedImage:
    """What an image is to become."""

    detail: Detail
    said: ProcessorKwargs


def make_item(
    processor: ImageProcessor,
    picture: Picture,
    wanted: WantedImage,
    asking: Asking,
) -> PreparedItem:
    """What is found by its key, or else what the processor makes of it, if it is admitted."""
    asking.admit(processor.num_tokens(picture, wanted.detail, wanted.said))
    key = processor.key(picture, wanted.detail, wanted.said)
    return asking.find(key) or processor.prepare(picture, wanted.detail, key, wanted.said)
