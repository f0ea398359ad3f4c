"""Fetches, decodes and prepares the images and videos of requests, beside the event loop.

Waiting for hosts happens in the event loop, everything that computes in threads of its own, since Pillow and numpy work
without the interpreter's lock for most of it, or in processes that these threads wait for.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from PIL import Image

from tokenmill_engine.errors import ContextLengthError, InvalidRequestError
from tokenmill_server.multimodal.asking import Asking
from tokenmill_server.multimodal.decoding_memory import DecodingMemory
from tokenmill_server.multimodal.errors import MediaError
from tokenmill_server.multimodal.failures import together
from tokenmill_server.multimodal.fetch import Budget, fetch, read_data_url, read_file, scheme_of
from tokenmill_server.multimodal.given_video import GivenVideo
from tokenmill_server.multimodal.held import HeldMedia, Holding
from tokenmill_server.multimodal.image_item import WantedImage
from tokenmill_server.multimodal.image_preparer import ImagePreparer
from tokenmill_server.multimodal.items import PreparedItem
from tokenmill_server.multimodal.names import file_name, given_name
from tokenmill_server.multimodal.parts import MediaSource, VideoSource
from tokenmill_server.multimodal.prepared import Prepare, PreparedMedia, UnknownMediaError
from tokenmill_server.multimodal.processor import ImageProcessor
from tokenmill_server.multimodal.settings import ENGINE_BOUNDS, MediaSettings
from tokenmill_server.multimodal.sites import SitePlaces
from tokenmill_server.multimodal.supply import LoadedItem
from tokenmill_server.multimodal.turns import Turn
from tokenmill_server.multimodal.video_preparer import VideoPreparer
from tokenmill_server.multimodal.wishes import MediaWishes
from tokenmill_server.processing.shown import shown

T = TypeVar("T")

_FETCHES_PER_THREAD = 4
"""How many images from one site there may be at a time, and local files: each is in memory until it is decoded."""
_MOST_SITES = 8
"""That may have so many at a time: a few which answer slowly keep no others waiting."""
_LOCAL_FILES = ""
_TURNS_PER_THREAD = 2
"""How many images of one request may be fetched and decoded at a time."""


class TokenRoom:
    """Tokens that the images of one request may still take. Threads share it. What does not fit is refused before it is
    prepared: that takes thousands of bytes for each token."""

    def __init__(self, num_tokens: int, max_image_tokens: int) -> None:
        self._left = num_tokens
        self._max_image_tokens = max_image_tokens
        self._lock = threading.Lock()

    def take(self, num_tokens: int, param: str, kind: str = "image") -> None:
        """Raises InvalidRequestError for an image or a video with so many tokens if that is too much. How large a video
        may be is known to who prepares it."""
        if num_tokens > self._max_image_tokens and kind == "image":
            raise InvalidRequestError(
                f"the image takes {num_tokens} tokens, and the engine holds {self._max_image_tokens} of one image; "
                f"send a smaller one ({ENGINE_BOUNDS})",
                param,
            )
        with self._lock:
            if num_tokens > self._left:
                raise ContextLengthError(
                    f"the {kind} takes {num_tokens} tokens, and this model's context (--max-model-len) has room for "
                    f"{self._left} more beside the text and the media before it",
                    param,
                )
            self._left -= num_tokens


class RoomFor:
    """A `Waiter`: one image or video, and the request that wants it."""

    def __init__(self, room: TokenRoom, param: str, kind: str = "image") -> None:
        self._room = room
        self._param = param
        self._kind = kind
        self._lock = threading.Lock()
        self._fits: bool | None = None
        self._refusal: InvalidRequestError | None = None

    def take(self, num_tokens: int) -> bool:
        with self._lock:
            if self._fits is None:
                try:
                    self._room.take(num_tokens, self._param, self._kind)
                except InvalidRequestError as error:
                    self._refusal = error
                self._fits = self._refusal is None
            return self._fits

    def check(self) -> None:
        if self._refusal is not None:
            raise self._refusal


class MediaLoader:
    """Shared by all requests of a process."""

    def __init__(
        self,
        processor: ImageProcessor | None,
        settings: MediaSettings,
        prepared: PreparedMedia,
        videos: VideoPreparer | None = None,
    ) -> None:
        """None: there are no images, or no videos, among the sources."""
        self.prepared = prepared
        self._memory = DecodingMemory(settings.memory_bytes)
        self.held = HeldMedia(settings.memory_bytes, refuses=settings.refuses_when_full)
        self._images = None if processor is None else ImagePreparer(processor, settings, self._memory)
        self._videos = videos
        self._flags = MediaWishes(settings.video_reading, settings.processor_kwargs)
        self._settings = settings
        self._threads = ThreadPoolExecutor(settings.loading_threads, thread_name_prefix="media")
        # Of their own: a video may take a minute, and a few of them would keep all images waiting.
        self._video_threads = ThreadPoolExecutor(max(1, settings.loading_threads // 2), thread_name_prefix="video")
        most_of_site = _FETCHES_PER_THREAD * settings.loading_threads
        self._fetches = SitePlaces(_MOST_SITES * most_of_site, most_of_site)

    async def load(
        self,
        sources: Sequence[MediaSource],
        room: TokenRoom,
        scope: tuple[str, ...] = (),
        wishes: MediaWishes | None = None,
        holding: Holding | None = None,
    ) -> list[LoadedItem]:
        """The media of one request, some at a time: others have their turn between those of a request with hundreds. If
        the caller is cancelled, or one fails, the others are given up. What a client of one `scope` names by a uuid is
        nothing to those of others. `wishes` None: as the flags say. `holding` gets what is in memory then; None: nobody
        counts that.

        Raises InvalidRequestError naming the field of one that cannot be had, or is too large for `room`;
        OverloadedError if other requests hold too much.
        """
        holding = holding or self.held.holding()
        budget = Budget(self._settings.max_bytes, holding.take)
        request = _Request(budget, room, scope, wishes or self._flags, holding)
        turns = asyncio.Semaphore(_TURNS_PER_THREAD * self._settings.loading_threads)

        async def load_one(source: MediaSource) -> LoadedItem:
            async with turns:
                return await self._load(source, request)

        try:
            holding.take(sum(len(source.content) for source in sources if isinstance(source.content, str)))
            return await together(load_one(source) for source in sources)
        except BaseException:
            holding.release()
            raise

    def close(self) -> None:
        """Ends the threads, once they have nothing left to do. Processes that prepare images end at once."""
        for threads in (self._threads, self._video_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._images is not None:
            self._images.close()

    async def _load(self, source: MediaSource, request: "_Request") -> LoadedItem:
        waiter = RoomFor(request.room, source.param, source.kind)
        options, prepare = self._work(source, request.wishes)
        given = None if source.uuid is None else given_name(request.scope, source.uuid, source.kind, options)
        content = source.content
        try:
            if content is None:
                item = self.prepared.find_given(given or b"", waiter)
                request.holding.take_item(item)
                return LoadedItem(item, source.param, None)
            if isinstance(content, Image.Image | GivenVideo):
                work: Prepare = partial(prepare, content)
                item = await self.prepared.prepare(None, waiter, work, self._runner(source.kind))
            elif scheme_of(content) == "data":
                data = await self._in_thread(partial(read_data_url, content, request.budget))
                item = await self._from_file(data, waiter, options, partial(prepare, data), source.kind)
                # The request has its own copy of these bytes; what others have may be another one next time.
                work = partial(self._read_and_prepare, content, prepare)
                request.holding.give(len(data))
            elif scheme_of(content) not in ("http", "https", "file"):
                raise _unknown_address(content, source.kind)
            else:
                async with Turn(self._fetches, id(request)) as turn:
                    data = await self._get(content, request.budget, source.kind, turn)
                    work = partial(prepare, data)
                    item = await self._from_file(data, waiter, options, work, source.kind)
            request.holding.take_item(item)
            loaded = self._loaded(item, work, source)
        except MediaError as error:
            raise MediaError(str(error), source.param) from error
        except UnknownMediaError as error:
            raise InvalidRequestError(
                f"no {source.kind} is known under this uuid: {error}; send its url as well, or the {source.kind} "
                "itself",
                source.param,
            ) from error
        if given is not None:
            self.prepared.give_name(given, loaded.item)
        return loaded

    def _work(self, source: MediaSource, wishes: MediaWishes) -> tuple[str, Callable[..., PreparedItem]]:
        """All that decides, beside its content, what becomes of a source; and what makes that of its content."""
        if isinstance(source, VideoSource):
            assert self._videos is not None
            return self._videos.options_text(wishes), partial(self._prepare_video, wishes)
        assert self._images is not None
        wanted = WantedImage(source.detail, wishes.kwargs)
        return self._images.options_text(wanted), partial(self._images.prepare, wanted)

    async def _from_file(self, data: bytes, waiter: RoomFor, options: str, work: Prepare, kind: str) -> PreparedItem:
        """An encoded image or video, decoded only if what it becomes is not known."""
        name, item = None, None
        if self.prepared.is_caching:
            name = await self._in_thread(partial(file_name, data, kind, options))
            item = self.prepared.find(name, waiter)
        return item or await self.prepared.prepare(name, waiter, work, self._runner(kind))

    def _loaded(self, item: PreparedItem, again: Prepare, source: MediaSource) -> LoadedItem:
        """`again` makes it once more, if the engine core lacks it."""
        runner = self._runner(source.kind)
        return LoadedItem(item, source.param, partial(self.prepared.prepare_again, item.key, again, runner))

    async def _get(self, url: str, budget: Budget, kind: str, turn: Turn) -> bytes:
        """The file at an address, when it is its turn."""
        if scheme_of(url) == "file":
            await turn.take(_LOCAL_FILES)
            return await self._in_thread(partial(read_file, url, self._settings, budget))
        return await fetch(url, self._settings, budget, kind, turn)

    def _runner(self, kind: str) -> Callable[[Callable[[], PreparedItem]], Awaitable[PreparedItem]]:
        return self._in_thread if kind == "image" else partial(self._in_thread, threads=self._video_threads)

    async def _in_thread(self, work: Callable[[], T], threads: ThreadPoolExecutor | None = None) -> T:
        held = [work]
        try:
            return await asyncio.get_running_loop().run_in_executor(threads or self._threads, lambda: held.pop()())
        finally:
            # Whoever is gone before a thread was free leaves an empty list in the queue, and no image.
            held.clear()

    # --- in threads -----------------------------------------------------------------------------------------------

    def _read_and_prepare(self, url: str, prepare: Callable[..., PreparedItem], asking: Asking) -> PreparedItem:
        return prepare(read_data_url(url, Budget(self._settings.max_bytes)), asking)

    def _prepare_video(self, wishes: MediaWishes, video: bytes | GivenVideo, asking: Asking) -> PreparedItem:
        assert self._videos is not None
        return self._videos.prepare(video, wishes, self._memory, asking)


@dataclass(frozen=True, slots=True)
class _Request:
    """What the media of one request share."""

    budget: Budget
    room: TokenRoom
    scope: tuple[str, ...]
    wishes: MediaWishes
    holding: Holding


def _unknown_address(url: str, kind: str) -> MediaError:
    return MediaError(
        f"{'an' if kind == 'image' else 'a'} {kind} has an http:, https: or data: address, or with "
        f"--allowed-local-media-path a file: address, got {shown(url)}; base64 text is an address behind "
        f"data:{'image/jpeg' if kind == 'image' else 'video/mp4'};base64,"
    )
