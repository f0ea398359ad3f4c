"""Images of requests: where the work is done, and what becomes of it when one fails."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from tests.support.media_host import answer, media_host
from tests.support.pictures import encoded, noise, picture, picture_url
from tests.support.prepared_items import WatchedProcessor, source
from tests.support.server import PATIENCE_S, wait_for
from tokenmill_engine.errors import ContextLengthError, InvalidRequestError
from tokenmill_server.multimodal import loader as loading_of_images
from tokenmill_server.multimodal import name_lookup
from tokenmill_server.multimodal.decode import Picture
from tokenmill_server.multimodal.errors import MediaError
from tokenmill_server.multimodal.items import PreparedItem
from tokenmill_server.multimodal.loader import MediaLoader, TokenRoom
from tokenmill_server.multimodal.parts import ImageSource, VideoSource
from tokenmill_server.multimodal.placement import CachePlacement, Placement
from tokenmill_server.multimodal.prepared import PreparedMedia
from tokenmill_server.multimodal.processor import Detail, ImageProcessor
from tokenmill_server.multimodal.processor_kwargs import ProcessorKwargs
from tokenmill_server.multimodal.settings import MediaSettings
from tokenmill_server.multimodal.turns import Turn
from tokenmill_server.multimodal.video_preparer import VideoPreparer
from tokenmill_server.multimodal.wishes import MediaWishes

SETTINGS = MediaSettings(loading_threads=2, allowed_domains=("localhost",), fetch_timeout_s=60.0, max_pixels=10_000)


def loader_of(processor: ImageProcessor, settings: MediaSettings) -> MediaLoader:
    """It remembers nothing."""
    return MediaLoader(processor, settings, PreparedMedia(CachePlacement(Placement.NOWHERE, 0, 0)))


@pytest.fixture
def processor() -> WatchedProcessor:
    return WatchedProcessor()


@pytest.fixture
def loader(processor: WatchedProcessor) -> Iterator[MediaLoader]:
    loader = loader_of(processor, SETTINGS)
    yield loader
    loader.close()


def load(loader: MediaLoader, *sources: ImageSource, room: TokenRoom | None = None) -> list[PreparedItem]:
    loaded = asyncio.run(loader.load(sources, room or TokenRoom(10_000, 10_000)))
    return [each.item for each in loaded]


def test_images_are_in_the_order_of_the_request(loader: MediaLoader, processor: WatchedProcessor) -> None:
    """And the work is done in the loader's own threads, no more of them than it may have."""
    sizes = [(20, 30), (16, 16), (64, 8), (8, 64), (40, 40), (9, 9)]
    with media_host(picture=answer(encoded(noise(33, 21)))) as host:
        sources = [source(picture_url(*size)) for size in sizes] + [source(host.url("/picture"))]
        images = load(loader, *sources)
    for size, image in zip([*sizes, (33, 21)], images, strict=True):
        assert image == processor.prepare(picture(noise(*size)))
    used = {thread for thread in processor.threads if thread is not threading.current_thread()}
    assert 1 <= len(used) <= 2
    assert all(thread.name.startswith("media") for thread in used)


def test_images_of_the_program_itself(loader: MediaLoader, processor: WatchedProcessor) -> None:
    pixels = noise(20, 30)
    given = Image.fromarray(pixels).convert("RGBA")
    (image,) = load(loader, source(given))
    assert image == processor.prepare(picture(pixels))
    assert (given.mode, np.asarray(given).shape) == ("RGBA", (20, 30, 4))
    with pytest.raises(MediaError, match="--max-image-pixels"):
        load(loader, source(Image.new("RGB", (101, 100))))


def test_one_that_fails_ends_the_others(loader: MediaLoader) -> None:
    """A host that never answers is not waited for."""
    with media_host() as host:
        host.pages["/never"] = lambda connection: host.stopped.wait() and None
        with pytest.raises(MediaError, match="no image that can be read") as failure:
            load(loader, source(host.url("/never")), source("data:,x", 1))
    assert failure.value.param == "image 1"


def test_no_more_is_fetched_than_can_soon_be_decoded(
    processor: WatchedProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was fetched is in memory until then. Nor may one request with many images keep others from theirs."""
    single = loader_of(processor, MediaSettings(loading_threads=1))
    num_fetched, go_on = 0, threading.Event()
    data = encoded(noise(20, 30))

    async def fetched(_url: str, _settings: MediaSettings, _budget: object, _kind: str, turn: Turn) -> bytes:
        nonlocal num_fetched
        await turn.take("x.example")
        num_fetched += 1
        return data

    def prepare(
        picture: Picture, detail: Detail = "auto", key: bytes | None = None, *said: ProcessorKwargs
    ) -> PreparedItem:
        go_on.wait()
        return ImageProcessor.prepare(processor, picture, detail, key, *said)

    async def work() -> list[int]:
        loading, before = [], []
        for _ in range(3):
            request = single.load([source("http://x.example/")] * 20, TokenRoom(10_000, 10_000))
            loading.append(asyncio.ensure_future(request))
            for _ in range(1000):
                await asyncio.sleep(0)
            before.append(num_fetched)
        go_on.set()
        assert [len(each) for each in await asyncio.gather(*loading)] == [20] * 3
        return before

    monkeypatch.setattr(loading_of_images, "fetch", fetched)
    monkeypatch.setattr(processor, "prepare", prepare)
    assert asyncio.run(work()) == [2, 4, 4]
    assert num_fetched == 60
    single.close()


def test_names_that_are_looked_up_for_long_keep_no_image_waiting(
    processor: WatchedProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than images may be fetched at a time."""
    silent = [f"silent{number}.example" for number in range(10)]
    single = loader_of(processor, replace(SETTINGS, loading_threads=1, allowed_domains=("localhost", *silent)))
    known, asked, go_on = name_lookup._addresses, list[str](), threading.Event()

    def addresses(host: str, port: int) -> list[str]:
        if host in silent:
            asked.append(host)
            go_on.wait(PATIENCE_S)
            raise OSError("nobody knows")
        return known(host, port)

    async def work(url: str) -> None:
        room = TokenRoom(10_000, 10_000)
        held = [asyncio.ensure_future(single.load([source(f"http://{host}/")], room)) for host in silent]
        async with asyncio.timeout(PATIENCE_S):
            while len(asked) < len(silent):
                await asyncio.sleep(0.001)
            assert len(await single.load([source(url)], room)) == 1
        go_on.set()
        for each in held:
            with pytest.raises(MediaError, match="cannot be found"):
                await each

    monkeypatch.setattr(name_lookup, "_addresses", addresses)
    with media_host(picture=answer(encoded(noise(20, 30)))) as host:
        try:
            asyncio.run(work(host.url("/picture")))
        finally:
            go_on.set()
            single.close()


def test_a_site_that_does_not_answer_keeps_no_other_waiting(processor: WatchedProcessor) -> None:
    """More images of it are wanted than may be fetched of one site at a time."""
    settings = replace(SETTINGS, loading_threads=1, allowed_domains=("localhost", "127.0.0.1"))
    single = loader_of(processor, settings)

    async def work(slow: str, quick: str) -> None:
        room = TokenRoom(10_000, 10_000)
        held = [asyncio.ensure_future(single.load([source(slow)], room)) for _ in range(6)]
        async with asyncio.timeout(PATIENCE_S):
            while host.paths.count("/slow") < 4:
                await asyncio.sleep(0.001)
            assert len(await single.load([source(quick)], room)) == 1
        assert host.paths.count("/slow") == 4
        for each in held:
            each.cancel()
        await asyncio.wait(held)

    with media_host(picture=answer(encoded(noise(20, 30)))) as host:
        host.pages["/slow"] = lambda connection: host.stopped.wait() and None
        try:
            asyncio.run(work(host.url("/slow"), host.url("/picture", "127.0.0.1")))
        finally:
            single.close()


def test_who_goes_before_its_turn_leaves_nothing(processor: WatchedProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though threads are busy for long, and no one looks at what waits for them."""
    single = loader_of(processor, replace(SETTINGS, loading_threads=1))
    begun, go_on = threading.Event(), threading.Event()

    def prepare(picture: Picture, *arguments: Any) -> PreparedItem:
        begun.set()
        go_on.wait()
        return ImageProcessor.prepare(processor, picture, *arguments)

    async def work() -> None:
        room = TokenRoom(10_000, 10_000)
        first = asyncio.ensure_future(single.load([source(picture_url(20, 30))], room))
        async with asyncio.timeout(PATIENCE_S):
            while not begun.is_set():
                await asyncio.sleep(0.001)
        image = Image.fromarray(noise(20, 30))
        gone, second = weakref.ref(image), asyncio.ensure_future(single.load([source(image)], room))
        del image
        async with asyncio.timeout(PATIENCE_S):
            while single._threads._work_queue.qsize() == 0:
                await asyncio.sleep(0.001)
        second.cancel()
        await asyncio.wait([second])
        del second
        gc.collect()
        assert gone() is None
        go_on.set()
        assert len(await first) == 1

    monkeypatch.setattr(processor, "prepare", prepare)
    try:
        asyncio.run(work())
    finally:
        go_on.set()
        single.close()


class HeldVideos:
    """Prepares no video before it is told to."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.may_end = threading.Event()

    def options_text(self, wishes: MediaWishes) -> str:
        return ""

    def prepare(self, data: bytes, *_arguments: object) -> PreparedItem:
        self.num_begun += 1
        self.may_end.wait()
        raise MediaError("the video is held")


def test_images_do_not_wait_for_videos(processor: WatchedProcessor) -> None:
    videos = HeldVideos()
    prepared = PreparedMedia(CachePlacement(Placement.NOWHERE, 0, 0))
    loader = MediaLoader(processor, SETTINGS, prepared, cast(VideoPreparer, videos))

    async def work() -> None:
        room = TokenRoom(10_000, 10_000)
        held = [
            asyncio.ensure_future(loader.load([VideoSource(f"data:,{number}", "video")], room)) for number in range(5)
        ]
        async with asyncio.timeout(PATIENCE_S):
            while videos.num_begun == 0:
                await asyncio.sleep(0.001)
            assert len(await loader.load([source(picture_url(20, 30))], room)) == 1
        assert videos.num_begun == 1
        videos.may_end.set()
        outcomes = await asyncio.gather(*held, return_exceptions=True)
        assert [str(each) for each in outcomes] == 5 * ["the video is held"]

    try:
        asyncio.run(work())
    finally:
        videos.may_end.set()
        loader.close()


def test_all_images_of_a_request_share_its_bytes(processor: WatchedProcessor) -> None:
    url = picture_url(20, 30)
    loader = loader_of(processor, MediaSettings(max_bytes=5000))
    assert len(load(loader, *[source(url)] * 2)) == 2
    with pytest.raises(MediaError, match="--max-media-bytes"):
        load(loader, *[source(url)] * 3)
    loader.close()


def test_what_has_no_room_is_not_prepared(loader: MediaLoader, processor: WatchedProcessor) -> None:
    url = picture_url(32, 32)
    (image,) = load(loader, source(url))
    processor.threads.clear()
    with pytest.raises(InvalidRequestError, match=f"takes {image.num_tokens} tokens, and the engine holds 3"):
        load(loader, source(url), room=TokenRoom(1000, 3))
    assert processor.threads == []
    with pytest.raises(ContextLengthError, match="has room for 0 more beside"):
        load(loader, *[source(url)] * 5, room=TokenRoom(image.num_tokens * 3, 1000))
    assert len(processor.threads) <= 3


def test_images_that_are_decoded_share_memory(processor: WatchedProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for one there is one at a time, however many threads there are."""
    small = loader_of(processor, replace(SETTINGS, memory_bytes=processor.memory_bytes(20, 30)))
    assert small._images is not None
    memory = small._images._memory
    now, most, num_done, lock = 0, 0, 0, threading.Lock()

    def prepare(picture: Picture, *arguments: Any) -> PreparedItem:
        nonlocal now, most, num_done
        with lock:
            now += 1
            most = max(most, now)
        wait_for(lambda: len(memory._waiting) > 0 or num_done == 19, PATIENCE_S, "the next image")
        item = ImageProcessor.prepare(processor, picture, *arguments)
        with lock:
            now -= 1
            num_done += 1
        return item

    monkeypatch.setattr(processor, "prepare", prepare)
    sizes = [(20, 30), (20, 20), (20, 30), (19, 30), (20, 30)] * 4
    load(small, *(source(picture_url(*size, seed)) for seed, size in enumerate(sizes)))
    assert most == 1
    with pytest.raises(MediaError, match=r"takes about 1 MiB .* more than the 0 MiB that --max-media-memory leaves"):
        load(small, source(picture_url(21, 30)))
    small.close()
