"""Prepares the images of one model: small ones in the thread that asks, large ones in processes of their own.

A thread that decodes or copies a large image holds the interpreter's lock at times, for milliseconds or, as with WebP,
for as long as decoding takes; and on a busy machine for longer, since it may lose its core meanwhile. The event loop,
and all streams on it, would wait.
"""

import logging
import os
import threading
from collections.abc import Callable

from PIL import Image

from tokenmill_server.multimodal.asking import Asking
from tokenmill_server.multimodal.decode import Picture, check_size, decode, opened, to_picture
from tokenmill_server.multimodal.decoding_memory import DecodingMemory, Lease
from tokenmill_server.multimodal.errors import MediaError
from tokenmill_server.multimodal.image_item import WantedImage, make_item
from tokenmill_server.multimodal.image_processes import CannotStartError, ImageFile, ImageProcesses
from tokenmill_server.multimodal.image_turns import alone_with
from tokenmill_server.multimodal.items import PreparedItem
from tokenmill_server.multimodal.processor import ImageProcessor
from tokenmill_server.multimodal.retrying import tried_twice
from tokenmill_server.multimodal.settings import MediaSettings

logger = logging.getLogger(__name__)

_LARGE_PIXELS = 4_000_000
_LARGE_PIXELS_OF = {"WEBP": 1_000_000}
"""Pillow decodes these without letting go of the interpreter's lock."""


class ImagePreparer:
    """Used from many threads at a time."""

    def __init__(self, processor: ImageProcessor, settings: MediaSettings, memory: DecodingMemory) -> None:
        self._processor = processor
        self._settings = settings
        self._memory = memory
        num_processes = settings.image_processes
        if num_processes is None:
            num_processes = min(settings.loading_threads, len(os.sched_getaffinity(0)))
        self._processes = ImageProcesses(processor, num_processes) if num_processes else None
        self._has_warned = False
        self._lock = threading.Lock()

    def options_text(self, wanted: WantedImage) -> str:
        """All that decides, beside the image, what `prepare` makes of it."""
        return self._processor.options_text(wanted.detail, wanted.said)

    def prepare(self, wanted: WantedImage, content: bytes | Image.Image, asking: Asking) -> PreparedItem:
        """The image, or that in the file `content`. Takes long: call it in a thread.

        Raises MediaError for what is no image, or goes beyond a limit; OverloadedError if its process is killed, also
        in a second attempt; and what `asking` does.
        """

        def attempt() -> PreparedItem:
            with self._memory.lease() as lease:
                return self._prepare(wanted, content, lease, asking)

        asking.check()
        return tried_twice(attempt, "image", asking.check)

    def _prepare(self, wanted: WantedImage, content: bytes | Image.Image, lease: Lease, asking: Asking) -> PreparedItem:
        def reserve(height: int, width: int) -> None:
            lease.take(self._processor.memory_bytes(height, width), asking.check)

        picture = self._decode_small(content, reserve)
        if isinstance(picture, ImageFile):
            assert self._processes is not None
            try:
                return self._processes.prepare(
                    picture, wanted, lambda num_bytes: lease.take(num_bytes, asking.check), asking
                )
            except CannotStartError as error:
                self._warn(error)
            picture = decode(picture.data, self._settings.max_pixels, reserve)
        return make_item(self._processor, picture, wanted, asking)

    def _decode_small(self, content: bytes | Image.Image, reserve: Callable[[int, int], None]) -> "Picture | ImageFile":
        """What is large stays as it is."""
        most = self._settings.max_pixels
        if isinstance(content, Image.Image):
            return _given(content, most, reserve)
        with opened(content, most) as file:
            most_here = _LARGE_PIXELS_OF.get(file.image.format or "", _LARGE_PIXELS)
            if self._processes is not None and self._processor.num_pixels(file.height, file.width) > most_here:
                return ImageFile(content, file.height, file.width, most)
            reserve(file.height, file.width)
            return to_picture(file.image)

    def _warn(self, error: CannotStartError) -> None:
        with self._lock:
            has_warned, self._has_warned = self._has_warned, True
        if not has_warned:
            logger.warning(
                "No process can be started to decode large images (%s): threads do it, which may delay streams.", error
            )

    def close(self) -> None:
        """Ends the processes."""
        if self._processes is not None:
            self._processes.close()


def _given(image: Image.Image, max_pixels: int, reserve: Callable[[int, int], None]) -> Picture:
    check_size(image.size, max_pixels)
    reserve(image.height, image.width)
    try:
        with alone_with(image):
            return to_picture(image)
    except (OSError, SyntaxError, ValueError) as error:
        raise MediaError(f"the image cannot be read: {error}") from error
