"""Images of requests, with a cache behind them: what is prepared once, what is sent once, and what nobody else gets."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.media_host import answer, media_host
from tests.support.pictures import data_url, encoded, noise, picture, picture_url
from tests.support.prepared_items import WatchedProcessor, source
from tokenmill_engine.errors import ContextLengthError, InvalidRequestError
from tokenmill_engine.media_store import media_bytes
from tokenmill_engine.messages import MediaItem
from tokenmill_server.multimodal import image_preparer
from tokenmill_server.multimodal.decode import Picture
from tokenmill_server.multimodal.errors import MediaError
from tokenmill_server.multimodal.items import PreparedItem
from tokenmill_server.multimodal.loader import MediaLoader, TokenRoom
from tokenmill_server.multimodal.parts import ImageSource
from tokenmill_server.multimodal.placement import CachePlacement, Placement
from tokenmill_server.multimodal.prepared import PreparedMedia
from tokenmill_server.multimodal.settings import MediaSettings
from tokenmill_server.multimodal.supply import LoadedItem, RequestSupply

pytestmark = pytest.mark.asyncio

SETTINGS = MediaSettings(loading_threads=3, allowed_domains=("localhost",), fetch_timeout_s=60.0, max_pixels=500_000)


class Server:
    """The part of an API server that has to do with media."""

    def __init__(self, placement: Placement, cache_bytes: int = 1 << 20, num_caches: int = 1) -> None:
        self.placement = placement
        self.lookups: list[bool] = []
        self.prepared = PreparedMedia(CachePlacement(placement, cache_bytes, num_caches), self.lookups.append)
        self.processor = WatchedProcessor()
        self.loader = MediaLoader(self.processor, SETTINGS, self.prepared)

    @property
    def num_prepared(self) -> int:
        return len(self.processor.threads)

    async def load(self, *sources: ImageSource, room: int = 10_000, scope: tuple[str, ...] = ()) -> list[LoadedItem]:
        return await self.loader.load(sources, TokenRoom(room, 10_000), scope)

    async def supply(self, *sources: ImageSource, **options: Any) -> RequestSupply:
        loaded = await self.load(*sources, **options)
        return RequestSupply(self.prepared, loaded, [each.item.at(9 * index) for index, each in enumerate(loaded)])

    async def send(self, *sources: ImageSource, **options: Any) -> list[bool]:
        """Of the images of a request, whether their tensors travel along."""
        return [bool(item.tensors) for item in (await self.supply(*sources, **options)).outgoing()]


@pytest.fixture(params=[Placement.KEYS, Placement.ITEMS])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(request.param)
    yield server
    server.loader.close()


@pytest.fixture
def keys() -> Iterator[Server]:
    server = Server(Placement.KEYS)
    yield server
    server.loader.close()


@pytest.fixture
def nowhere() -> Iterator[Server]:
    server = Server(Placement.NOWHERE, 0)
    yield server
    server.loader.close()


def fresh(pixels: np.ndarray[Any, Any], detail: Any = "auto") -> PreparedItem:
    """What it becomes where nothing is remembered."""
    return WatchedProcessor().prepare(picture(pixels), detail)


def alike(item: PreparedItem, wanted: PreparedItem) -> bool:
    """Beside tensors, which may be elsewhere."""
    return item.without_tensors() == wanted.without_tensors() and item.tensors in ({}, wanted.tensors)


def num_waiting(server: Server) -> int:
    """Requests that wait for what is being prepared."""
    return sum(len(flight._waiters) for flight in server.prepared._flights._flights.values())


async def turns() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


# --- once ---------------------------------------------------------------------------------------------------------


async def test_a_known_file_is_neither_decoded_nor_prepared_again(server: Server, monkeypatch: Any) -> None:
    url = picture_url(40, 60)
    assert await server.send(source(url)) == [True]

    def never(*_arguments: object) -> Picture:
        raise AssertionError("decoded again")

    monkeypatch.setattr(image_preparer, "opened", never)
    (again,) = await server.load(source(url))
    with media_host(picture=answer(encoded(noise(40, 60)))) as host:
        (fetched,) = await server.load(source(host.url("/picture")))
    for loaded in (again, fetched):
        assert alike(loaded.item, fresh(noise(40, 60)))
    assert server.num_prepared == 1
    assert server.lookups == [False, True, True]


async def test_another_file_of_the_same_image_is_not_prepared_again(server: Server) -> None:
    pixels = noise(40, 60)
    await server.send(source(picture_url(40, 60)))
    for other in (
        data_url(encoded(pixels, "BMP")),
        Image.fromarray(pixels),
        data_url(encoded(pixels, compress_level=1)),
    ):
        (loaded,) = await server.load(source(other))
        assert alike(loaded.item, fresh(pixels))
    assert server.num_prepared == 1
    assert server.lookups == [False, True, True, True]


async def test_with_keys_it_is_sent_once_and_with_items_each_time(server: Server) -> None:
    url, other = picture_url(40, 60), picture_url(40, 60, 1)
    assert await server.send(source(url), source(other), source(url)) == [True, True, False]
    travels = server.placement is Placement.ITEMS
    assert await server.send(source(other), source(url)) == [travels, travels]
    assert server.num_prepared == 2


async def test_only_what_was_sent_is_left_out(keys: Server) -> None:
    """A request that was refused after its image was prepared is no reason to leave it out."""
    url = picture_url(40, 60)
    refused = await keys.supply(source(url))
    del refused
    assert await keys.send(source(url)) == [True]
    assert await keys.send(source(url)) == [False]
    keys.prepared.engine_lost()
    assert await keys.send(source(url)) == [True]


async def test_who_comes_while_it_is_prepared_waits_for_it(server: Server, monkeypatch: Any) -> None:
    url, go_on = picture_url(40, 60), threading.Event()
    begun = threading.Event()

    def slow(picture: Picture, detail: Any = "auto", key: bytes | None = None, *said: Any) -> PreparedItem:
        begun.set()
        go_on.wait()
        return WatchedProcessor.prepare(server.processor, picture, detail, key, *said)

    monkeypatch.setattr(server.processor, "prepare", slow)
    tasks = [asyncio.ensure_future(server.load(source(url))) for _ in range(7)]
    async with asyncio.timeout(60):  # each finds out in a thread of what name it is
        while not begun.is_set() or num_waiting(server) < 7:
            await asyncio.sleep(0.001)
    tasks[0].cancel()
    await turns()
    go_on.set()
    loaded = [(await task)[0].item for task in tasks[1:]]
    assert all(each == fresh(noise(40, 60)) for each in loaded)
    assert server.num_prepared == 1
    assert (len(server.lookups), server.lookups.count(False)) in ((6, 0), (6, 1))  # whoever began may have left


async def test_who_has_it_in_hand_shares_it_until_it_is_sent(keys: Server) -> None:
    """Between the preparation and the sending others may load for long."""
    url = picture_url(40, 60)
    first = await keys.supply(source(url))
    second = await keys.supply(source(url))
    assert keys.num_prepared == 1
    assert [bool(item.tensors) for item in second.outgoing()] == [True]
    assert [bool(item.tensors) for item in first.outgoing()] == [False]


# --- no half-entries ----------------------------------------------------------------------------------------------


async def test_failed_and_refused_images_leave_nothing(server: Server) -> None:
    pixels = noise(40, 60)
    damaged = data_url(encoded(pixels)[:900])
    for _ in range(2):
        with pytest.raises(MediaError, match="damaged"):
            await server.load(source(damaged, uuid="mine"), source(picture_url(20, 20)))
        with pytest.raises(ContextLengthError):
            await server.load(source(picture_url(40, 60)), room=1)
    assert server.prepared.tensors_of(fresh(pixels).without_tensors()) is None
    with pytest.raises(InvalidRequestError, match="not sent before"):
        await server.load(source(None, uuid="mine"))
    (loaded,) = await server.load(source(picture_url(40, 60)))
    assert loaded.item == fresh(pixels)


async def test_cancelled_at_any_time(server: Server) -> None:
    urls = [picture_url(40, 60), picture_url(30, 20)]
    for number in range(25):
        task = asyncio.ensure_future(server.supply(*map(source, urls)))
        for _ in range(number):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    supply = await server.supply(*map(source, urls))
    wanted = [fresh(noise(40, 60)), fresh(noise(30, 20))]
    assert [item.tensors for item in supply.outgoing()] == [each.tensors for each in wanted]


# --- nobody else's ------------------------------------------------------------------------------------------------


def paletted(seed: int) -> Image.Image:
    image = Image.new("P", (40, 30))
    image.putdata([index % 16 for index in range(1200)])
    image.putpalette(noise(16, 1, seed).tobytes())
    return image


@pytest.mark.parametrize(
    "make",
    [
        lambda: [noise(120, 80, 3), noise(120, 80, 3).reshape(80, 120, 3), noise(120, 80, 3).reshape(96, 100, 3)],
        lambda: [paletted(0), paletted(1), Image.fromarray(np.arange(1200, dtype=np.uint8).reshape(30, 40) % 16)],
        lambda: [noise(30, 40, 5), Image.fromarray(noise(30, 40, 5)[:, :, 0]), noise(30, 40, 5)[:, :, ::-1]],
    ],
)
async def test_the_same_bytes_as_something_else(server: Server, make: Callable[[], list[Any]]) -> None:
    """In another shape, with another palette, in another mode."""
    images = make()
    for _ in range(2):
        for image in images:
            (loaded,) = await server.load(source(data_url(encoded(image))))
            pixels = np.asarray(image.convert("RGB")) if isinstance(image, Image.Image) else image
            assert alike(loaded.item, fresh(np.ascontiguousarray(pixels)))
            await server.send(source(data_url(encoded(image))))
    assert server.num_prepared == len(images)


async def test_the_detail_is_part_of_it(server: Server) -> None:
    url = picture_url(600, 600)
    for _ in range(2):
        for detail in ("low", "auto", "high"):
            (loaded,) = await server.load(source(url, detail=detail))
            assert alike(loaded.item, fresh(noise(600, 600), detail))
            await server.send(source(url, detail=detail))


async def test_swapped_images_are_swapped(server: Server) -> None:
    first, second = picture_url(40, 60, 1), picture_url(40, 60, 2)
    for order in ((first, second), (second, first), (first, first), (first, second)):
        loaded = await server.load(*map(source, order))
        wanted = [fresh(noise(40, 60, 1 if url is first else 2)) for url in order]
        assert [each.item.key for each in loaded] == [each.key for each in wanted]
        await server.send(*map(source, order))


# --- names that clients give --------------------------------------------------------------------------------------


async def test_a_uuid_stands_for_what_was_sent_with_it(server: Server) -> None:
    url = picture_url(40, 60)
    await server.send(source(url, uuid="mine"))
    (loaded,) = await server.load(source(None, uuid="mine"))
    assert alike(loaded.item, fresh(noise(40, 60)))
    assert server.num_prepared == 1
    assert server.lookups == [False, True]
    for other in (source(None, 1, uuid="yours"), source(None, 1, detail="low", uuid="mine")):
        with pytest.raises(InvalidRequestError, match=r"not sent before.*send its url") as failure:
            await server.load(other)
        assert failure.value.param == "image 1"


async def test_each_of_several_api_servers_has_its_own_uuids() -> None:
    first, second = Server(Placement.ITEMS, num_caches=2), Server(Placement.ITEMS, num_caches=2)
    await first.send(source(picture_url(40, 60), uuid="mine"))
    with pytest.raises(InvalidRequestError, match=r"to this API server, one of 2 that know their own.*send its url"):
        await second.load(source(None, uuid="mine"))
    await second.send(source(picture_url(40, 60), uuid="mine"))
    (loaded,) = await second.load(source(None, uuid="mine"))
    assert alike(loaded.item, fresh(noise(40, 60)))


async def test_a_uuid_is_nothing_to_others(server: Server) -> None:
    """Whoever shows another API key, or another salt, means something else by it, or nothing."""
    mine, yours = ("key a", ""), ("key b", "")
    await server.send(source(picture_url(40, 60, 1), uuid="cat"), scope=mine)
    for scope in (yours, ("key a", "salt"), ("", ""), ()):
        with pytest.raises(InvalidRequestError, match="not sent before"):
            await server.load(source(None, uuid="cat"), scope=scope)
    await server.send(source(picture_url(40, 60, 2), uuid="cat"), scope=yours)
    for seed, scope in ((1, mine), (2, yours)):
        (loaded,) = await server.load(source(None, uuid="cat"), scope=scope)
        assert loaded.item.key == fresh(noise(40, 60, seed)).key


async def test_what_is_sent_counts_not_what_it_is_called(server: Server) -> None:
    """And a uuid that was given to two images stands for neither any more."""
    await server.send(source(picture_url(40, 60, 1), uuid="cat"))
    (other,) = await server.load(source(picture_url(40, 60, 2), uuid="cat"))
    assert other.item.key == fresh(noise(40, 60, 2)).key
    with pytest.raises(InvalidRequestError, match="different contents"):
        await server.load(source(None, uuid="cat"))
    (first,) = await server.load(source(picture_url(40, 60, 1), uuid="cat"))
    assert first.item.key == fresh(noise(40, 60, 1)).key


async def test_a_uuid_of_what_was_evicted() -> None:
    """A clear error, and no harm to who sends the image along."""
    small = Server(Placement.ITEMS, 3 * media_bytes(fresh(noise(40, 60)).tensors))
    await small.send(source(picture_url(40, 60, 1), uuid="a"))
    await small.send(source(picture_url(40, 60, 2)), source(picture_url(40, 60, 3)))
    with pytest.raises(InvalidRequestError, match="not kept any more"):
        await small.load(source(None, uuid="a"))
    await small.load(source(picture_url(40, 60, 1), uuid="a"))
    await small.load(source(None, uuid="a"))
    small.loader.close()


async def test_a_uuid_of_what_died_with_the_engine(keys: Server) -> None:
    await keys.send(source(picture_url(40, 60, 1), uuid="a"))
    named = await keys.supply(source(None, 7, uuid="a"))
    assert [item.tensors for item in named.outgoing()] == [{}]
    keys.prepared.engine_lost()
    gone = named.places[0].key
    async with asyncio.timeout(60):  # the thread that prepared it lets go of it in its own time
        while keys.prepared.tensors_of(PreparedItem("image", gone, 1, None, {})) is not None:
            await asyncio.sleep(0.001)
    with pytest.raises(InvalidRequestError, match="send the media themselves along") as failure:
        await named.restored()
    assert failure.value.param == "image 7"
    with pytest.raises(InvalidRequestError, match="not kept any more"):
        await keys.load(source(None, uuid="a"))


async def test_without_a_cache_a_uuid_adds_nothing(nowhere: Server) -> None:
    url = picture_url(40, 60)
    for _ in range(2):
        (loaded,) = await nowhere.load(source(url, uuid="mine"))
        assert loaded.item == fresh(noise(40, 60))
        assert await nowhere.send(source(url), source(url)) == [True, False]
    assert nowhere.num_prepared == 6
    assert nowhere.lookups == []
    with pytest.raises(InvalidRequestError, match="--mm-processor-cache-gb is 0"):
        await nowhere.load(source(None, uuid="mine"))


# --- room ---------------------------------------------------------------------------------------------------------


async def test_more_images_than_the_cache_holds() -> None:
    """In one request, again and again; and one that is larger than all of it."""
    for placement in (Placement.KEYS, Placement.ITEMS):
        server = Server(placement, 3 * media_bytes(fresh(noise(40, 60)).tensors))
        urls = [picture_url(40, 60, seed) for seed in range(6)] + [picture_url(300, 300)]
        wanted = [fresh(noise(40, 60, seed)) for seed in range(6)] + [fresh(noise(300, 300))]
        for _ in range(3):
            supply = await server.supply(*map(source, urls))
            travelling = supply.outgoing()
            assert [item.key for item in travelling] == [each.key for each in wanted]
            assert all(item.tensors in ({}, each.tensors) for item, each in zip(travelling, wanted, strict=True))
            assert travelling[-1].tensors == wanted[-1].tensors
            assert [item.tensors for item in await supply.restored()] == [each.tensors for each in wanted]
        server.loader.close()


# --- once more ----------------------------------------------------------------------------------------------------


async def test_what_an_engine_lacks_is_made_again_from_what_was_sent(server: Server) -> None:
    """However it came, and whether it was known or not."""
    pixels = [noise(40, 60, seed) for seed in range(4)]
    with media_host(picture=answer(encoded(pixels[1]))) as host:
        sources = [
            source(data_url(encoded(pixels[0]))),
            source(host.url("/picture")),
            source(Image.fromarray(pixels[2])),
            source(data_url(encoded(pixels[3]))),
        ]
        first = await server.supply(*sources)
        second = await server.supply(*sources)
        host.pages["/picture"] = answer(encoded(noise(8, 8)))
        for supply in (first, second):
            supply.outgoing()
            media = await supply.restored()
            assert [item.tensors for item in media] == [fresh(each).tensors for each in pixels]
            assert [(item.key, item.offset) for item in media] == [(item.key, item.offset) for item in supply.places]
            assert all(item.tensors == {} for item in supply.places)


async def test_what_was_sent_is_not_held_any_more(keys: Server) -> None:
    """Tensors go with the request; what they were made of, with its first output."""
    supply = await keys.supply(source(picture_url(40, 60)))
    (item,) = supply.outgoing()
    assert isinstance(item, MediaItem)
    assert all(loaded.item.tensors == {} for loaded in supply._loaded)
    supply.settle()
    with pytest.raises(RuntimeError, match="every sequence had an answer"):
        await supply.restored()
