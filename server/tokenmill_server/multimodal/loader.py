"""Fetches, decodes and prepares the images of requests, beside the event loop.

Waiting for hosts happens in the event loop, everything that computes in threads of its own: Pillow and numpy work
without the interpreter's lock for most of it.
"""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from PIL import Image

from tokenmill_engine.errors import ContextLengthError, InvalidRequestError
from tokenmill_server.multimodal.addresses import MediaError
from tokenmill_server.multimodal.decode import Picture, check_size, decode, to_picture
from tokenmill_server.multimodal.fetch import Budget, fetch, read_data_url, read_file, scheme_of
from tokenmill_server.multimodal.parts import ImageSource
from tokenmill_server.multimodal.processor import ImageProcessor, PreparedImage
from tokenmill_server.multimodal.settings import MediaSettings

_FETCHES_PER_THREAD = 4
"""How many images from hosts there may be at a time: each is in memory until it is decoded."""


class TokenRoom:
    """Tokens that the images of one request may still take. Threads share it. What does not fit is refused before it is
    prepared: that takes thousands of bytes for each token."""

    def __init__(self, num_tokens: int, max_image_tokens: int) -> None:
        self._left = num_tokens
        self._max_image_tokens = max_image_tokens
        self._lock = threading.Lock()

    def take(self, num_tokens: int, param: str) -> None:
        """Raises InvalidRequestError for an image with so many tokens if that is too much."""
        if num_tokens > self._max_image_tokens:
            raise InvalidRequestError(
                f"the image takes {num_tokens} tokens, and the engine holds {self._max_image_tokens} of one image; "
                "send a smaller one",
                param,
            )
        with self._lock:
            if num_tokens > self._left:
                raise ContextLengthError("the images take more tokens than this model's context has room for", param)
            self._left -= num_tokens


class MediaLoader:
    """Shared by all requests of a process."""

    def __init__(self, processor: ImageProcessor, settings: MediaSettings) -> None:
        self._processor = processor
        self._settings = settings
        self._threads = ThreadPoolExecutor(settings.loading_threads, thread_name_prefix="media")
        self._fetches = asyncio.Semaphore(_FETCHES_PER_THREAD * settings.loading_threads)

    async def load(self, sources: Sequence[ImageSource], room: TokenRoom) -> list[PreparedImage]:
        """The images of one request, all at a time. If the caller is cancelled, or one fails, the others are given up.

        Raises InvalidRequestError naming the field of one that cannot be had, or is too large for `room`.
        """
        budget = Budget(self._settings.max_bytes)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._load(source, budget, room)) for source in sources]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    def close(self) -> None:
        """Ends the threads, once they have nothing left to do."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _load(self, source: ImageSource, budget: Budget, room: TokenRoom) -> PreparedImage:
        loop = asyncio.get_running_loop()
        try:
            data = source.image
            if isinstance(data, str) and scheme_of(data) in ("http", "https"):
                async with self._fetches:
                    fetched = await fetch(data, self._settings, budget)
                    return await loop.run_in_executor(self._threads, self._decode_and_prepare, fetched, source, room)
            return await loop.run_in_executor(self._threads, self._read_and_prepare, source, budget, room)
        except MediaError as error:
            raise MediaError(str(error), source.param) from error

    # --- in threads -----------------------------------------------------------------------------------------------

    def _read_and_prepare(self, source: ImageSource, budget: Budget, room: TokenRoom) -> PreparedImage:
        image = source.image
        if isinstance(image, Image.Image):
            return self._prepare(_given(image, self._settings.max_pixels), source, room)
        match scheme_of(image):
            case "data":
                data = read_data_url(image, budget)
            case "file":
                data = read_file(image, self._settings, budget)
            case _:
                raise MediaError("an image has an http:, https: or data: address")
        return self._decode_and_prepare(data, source, room)

    def _decode_and_prepare(self, data: bytes, source: ImageSource, room: TokenRoom) -> PreparedImage:
        return self._prepare(decode(data, self._settings.max_pixels), source, room)

    def _prepare(self, picture: Picture, source: ImageSource, room: TokenRoom) -> PreparedImage:
        room.take(self._processor.num_tokens(picture, source.detail), source.param)
        return self._processor.prepare(picture, source.detail)


def _given(image: Image.Image, max_pixels: int) -> Picture:
    check_size(image, max_pixels)
    try:
        return to_picture(image)
    except (OSError, SyntaxError, ValueError) as error:
        raise MediaError(f"the image cannot be read: {error}") from error
