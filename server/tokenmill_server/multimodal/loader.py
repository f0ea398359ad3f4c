"""Fetches, decodes and prepares the images of requests, beside the event loop.

Waiting for hosts happens in the event loop, everything that computes in threads of its own: Pillow and numpy work
without the interpreter's lock for most of it.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from PIL import Image

from tokenmill_server.multimodal.addresses import MediaError
from tokenmill_server.multimodal.decode import Picture, check_size, decode, to_picture
from tokenmill_server.multimodal.fetch import Budget, fetch, read_data_url, read_file, scheme_of
from tokenmill_server.multimodal.parts import ImageSource
from tokenmill_server.multimodal.processor import ImageProcessor, PreparedImage
from tokenmill_server.multimodal.settings import MediaSettings

_FETCHES_PER_THREAD = 4
"""How many fetches there may be at a time: each holds what it has so far in memory."""


class MediaLoader:
    """Shared by all requests of a process."""

    def __init__(self, processor: ImageProcessor, settings: MediaSettings) -> None:
        self._processor = processor
        self._settings = settings
        self._threads = ThreadPoolExecutor(settings.loading_threads, thread_name_prefix="media")
        self._fetches = asyncio.Semaphore(_FETCHES_PER_THREAD * settings.loading_threads)

    async def load(self, sources: Sequence[ImageSource]) -> list[PreparedImage]:
        """The images of one request, all at a time. If the caller is cancelled, or one fails, the others are given up.

        Raises MediaError naming the field of one that cannot be had.
        """
        budget = Budget(self._settings.max_bytes)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._load(source, budget)) for source in sources]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    def close(self) -> None:
        """Ends the threads, once they have nothing left to do."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _load(self, source: ImageSource, budget: Budget) -> PreparedImage:
        loop = asyncio.get_running_loop()
        try:
            data = source.image
            if isinstance(data, str) and scheme_of(data) in ("http", "https"):
                async with self._fetches:
                    fetched = await fetch(data, self._settings, budget)
                return await loop.run_in_executor(self._threads, self._decode_and_prepare, fetched, source)
            return await loop.run_in_executor(self._threads, self._read_and_prepare, source, budget)
        except MediaError as error:
            raise MediaError(str(error), source.param) from error

    # --- in threads -----------------------------------------------------------------------------------------------

    def _read_and_prepare(self, source: ImageSource, budget: Budget) -> PreparedImage:
        image = source.image
        if isinstance(image, Image.Image):
            return self._prepare(_given(image, self._settings.max_pixels), source)
        match scheme_of(image):
            case "data":
                data = read_data_url(image, budget)
            case "file":
                data = read_file(image, self._settings, budget)
            case _:
                raise MediaError("an image has an http:, https: or data: address")
        return self._decode_and_prepare(data, source)

    def _decode_and_prepare(self, data: bytes, source: ImageSource) -> PreparedImage:
        return self._prepare(decode(data, self._settings.max_pixels), source)

    def _prepare(self, picture: Picture, source: ImageSource) -> PreparedImage:
        return self._processor.prepare(picture, source.detail)


def _given(image: Image.Image, max_pixels: int) -> Picture:
    check_size(image, max_pixels)
    try:
        return to_picture(image)
    except (OSError, SyntaxError, ValueError) as error:
        raise MediaError(f"the image cannot be read: {error}") from error
