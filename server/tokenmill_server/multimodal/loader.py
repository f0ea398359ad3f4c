"""Fetches, decodes and prepares the images of requests, beside the event loop.

Waiting for hosts happens in the event loop, everything that computes in threads of its own: Pillow and numpy work
without the interpreter's lock for most of it.
"""

import asyncio
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from PIL import Image

from tokenmill_engine.errors import ContextLengthError, InvalidRequestError
from tokenmill_server.multimodal.addresses import MediaError
from tokenmill_server.multimodal.decode import Picture, check_size, decode, to_picture
from tokenmill_server.multimodal.fetch import Budget, fetch, read_data_url, read_file, scheme_of
from tokenmill_server.multimodal.flights import Admit
from tokenmill_server.multimodal.items import PreparedItem
from tokenmill_server.multimodal.names import file_name, given_name
from tokenmill_server.multimodal.parts import ImageSource
from tokenmill_server.multimodal.prepared import Find, Prepare, PreparedMedia, UnknownMediaError
from tokenmill_server.multimodal.processor import Detail, ImageProcessor
from tokenmill_server.multimodal.settings import MediaSettings
from tokenmill_server.multimodal.supply import LoadedItem

T = TypeVar("T")

_KIND = "image"
_FETCHES_PER_THREAD = 4
"""How many images from hosts there may be at a time: each is in memory until it is decoded."""
_SWITCH_INTERVAL_S = 0.001
"""How long a media thread goes on once the event loop wants to: a fifth of Python's own, since several threads may be
asked one after another."""


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


class RoomFor:
    """A `Waiter`: one image, and the request that wants it."""

    def __init__(self, room: TokenRoom, param: str) -> None:
        self._room = room
        self._param = param
        self._lock = threading.Lock()
        self._fits: bool | None = None
        self._refusal: InvalidRequestError | None = None

    def take(self, num_tokens: int) -> bool:
        with self._lock:
            if self._fits is None:
                try:
                    self._room.take(num_tokens, self._param)
                except InvalidRequestError as error:
                    self._refusal = error
                self._fits = self._refusal is None
            return self._fits

    def check(self) -> None:
        if self._refusal is not None:
            raise self._refusal


class MediaLoader:
    """Shared by all requests of a process."""

    def __init__(self, processor: ImageProcessor, settings: MediaSettings, prepared: PreparedMedia) -> None:
        self.prepared = prepared
        self._processor = processor
        self._settings = settings
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))
        self._threads = ThreadPoolExecutor(settings.loading_threads, thread_name_prefix="media")
        self._fetches = asyncio.Semaphore(_FETCHES_PER_THREAD * settings.loading_threads)

    async def load(
        self, sources: Sequence[ImageSource], room: TokenRoom, scope: tuple[str, ...] = ()
    ) -> list[LoadedItem]:
        """The images of one request, all at a time. If the caller is cancelled, or one fails, the others are given up.
        What a client of one `scope` names by a uuid is nothing to those of others.

        Raises InvalidRequestError naming the field of one that cannot be had, or is too large for `room`.
        """
        budget = Budget(self._settings.max_bytes)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._load(source, budget, room, scope)) for source in sources]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    def close(self) -> None:
        """Ends the threads, once they have nothing left to do."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _load(self, source: ImageSource, budget: Budget, room: TokenRoom, scope: tuple[str, ...]) -> LoadedItem:
        waiter = RoomFor(room, source.param)
        options = self._processor.options_text(source.detail)
        given = None if source.uuid is None else given_name(scope, source.uuid, _KIND, options)
        try:
            if source.image is None:
                return LoadedItem(self.prepared.find_given(given or b"", waiter), source.param, None)
            if isinstance(source.image, Image.Image):
                work = partial(self._prepare_given, source.image, source.detail)
                item = await self.prepared.prepare(None, waiter, work, self._in_thread)
                loaded = self._loaded(item, work, source)
            elif scheme_of(source.image) in ("http", "https"):
                async with self._fetches:
                    data = await fetch(source.image, self._settings, budget)
                    loaded = await self._from_file(data, waiter, options, source)
            else:
                data = await self._in_thread(partial(self._read, source.image, budget))
                loaded = await self._from_file(data, waiter, options, source)
        except MediaError as error:
            raise MediaError(str(error), source.param) from error
        except UnknownMediaError as error:
            raise InvalidRequestError(
                f"no image is known under this uuid: {error}; send its url as well", source.param
            ) from error
        if given is not None:
            self.prepared.give_name(given, loaded.item)
        return loaded

    async def _from_file(self, data: bytes, waiter: RoomFor, options: str, source: ImageSource) -> LoadedItem:
        """An encoded image, decoded only if what it becomes is not known."""
        work: Prepare = partial(self._decode_and_prepare, data, source.detail)
        name, item = None, None
        if self.prepared.is_caching:
            name = await self._in_thread(partial(file_name, data, _KIND, options))
            item = self.prepared.find(name, waiter)
        if item is None:
            item = await self.prepared.prepare(name, waiter, work, self._in_thread)
        if isinstance(source.image, str) and scheme_of(source.image) == "data":
            # The request has its own copy of these bytes; what others have may be another one next time.
            work = partial(self._read_and_prepare, source.image, source.detail)
        return self._loaded(item, work, source)

    def _loaded(self, item: PreparedItem, again: Prepare, source: ImageSource) -> LoadedItem:
        """`again` makes it once more, if the engine core lacks it."""
        return LoadedItem(item, source.param, partial(self.prepared.prepare_again, item.key, again, self._in_thread))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    # --- in threads -----------------------------------------------------------------------------------------------

    def _read(self, image: str, budget: Budget) -> bytes:
        match scheme_of(image):
            case "data":
                return read_data_url(image, budget)
            case "file":
                return read_file(image, self._settings, budget)
        raise MediaError("an image has an http:, https: or data: address")

    def _read_and_prepare(self, image: str, detail: Detail, admit: Admit, find: Find) -> PreparedItem:
        data = self._read(image, Budget(self._settings.max_bytes))
        return self._decode_and_prepare(data, detail, admit, find)

    def _decode_and_prepare(self, data: bytes, detail: Detail, admit: Admit, find: Find) -> PreparedItem:
        return self._prepare(decode(data, self._settings.max_pixels), detail, admit, find)

    def _prepare_given(self, image: Image.Image, detail: Detail, admit: Admit, find: Find) -> PreparedItem:
        return self._prepare(_given(image, self._settings.max_pixels), detail, admit, find)

    def _prepare(self, picture: Picture, detail: Detail, admit: Admit, find: Find) -> PreparedItem:
        admit(self._processor.num_tokens(picture, detail))
        key = self._processor.key(picture, detail)
        return find(key) or self._processor.prepare(picture, detail, key)


def _given(image: Image.Image, max_pixels: int) -> Picture:
    check_size(image, max_pixels)
    try:
        return to_picture(image)
    except (OSError, SyntaxError, ValueError) as error:
        raise MediaError(f"the image cannot be read: {error}") from error
