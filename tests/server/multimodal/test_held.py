"""Bytes of media that requests hold while they wait."""

import asyncio
import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.media_host import answer, media_host
from tests.support.pictures import data_url, encoded, noise
from tests.support.prepared_items import MADE_UP_BYTES, WatchedProcessor, made_up, source
from tests.support.server import PATIENCE_S
from tokenmill_engine.errors import OverloadedError
from tokenmill_server.multimodal.errors import MediaError
from tokenmill_server.multimodal.held import HeldMedia
from tokenmill_server.multimodal.loader import MediaLoader, TokenRoom
from tokenmill_server.multimodal.parts import ImageSource
from tokenmill_server.multimodal.placement import CachePlacement, Placement
from tokenmill_server.multimodal.prepared import PreparedMedia
from tokenmill_server.multimodal.settings import MediaSettings
from tokenmill_server.multimodal.supply import RequestSupply

FILE = encoded(noise(40, 60), "BMP") + bytes(20_000)
URL = data_url(FILE)
ITEM_BYTES = 20_000
"""A bit more than what the image becomes."""
REFUSAL = r"other requests take the 0 MiB that --max-media-memory leaves to them all"


def test_files() -> None:
    held = HeldMedia(100)
    first, second = held.holding(), held.holding()
    first.take(60)
    second.take(40)
    first.give(10)
    second.take(10)
    assert held.num_bytes == 100
    first.release()
    first.release()
    assert held.num_bytes == 50
    del second
    assert held.num_bytes == 0


def test_what_is_refused_makes_room_for_others() -> None:
    """Files of many requests come in at the same time, each in as many pieces. Those who are refused hear so late."""
    held = HeldMedia(300)
    holdings, refused = [held.holding() for _ in range(8)], set()
    for _ in range(6):
        for number, each in enumerate(holdings):
            try:
                each.take(10)
            except OverloadedError:
                refused.add(number)
    assert len(refused) == 3
    assert held.num_bytes == 5 * 60


def test_who_was_refused_stays_refused() -> None:
    held = HeldMedia(100)
    first, second = held.holding(), held.holding()
    first.take(60)
    second.take(40)
    with pytest.raises(OverloadedError, match=REFUSAL):
        second.take(1)
    first.give(60)
    with pytest.raises(OverloadedError, match=REFUSAL):
        second.take(1)
    with pytest.raises(OverloadedError, match=REFUSAL):
        second.take_item(made_up(1))
    second.give(40)
    second.send_items([made_up(1)])
    second.release()
    assert held.num_bytes == 0
    first.take(100)


def test_one_alone_may_have_more() -> None:
    held = HeldMedia(100)
    first, second = held.holding(), held.holding()
    first.take(150)
    first.take(150)
    with pytest.raises(OverloadedError, match=REFUSAL):
        second.take(1)
    first.release()
    held.holding().take(1)


@pytest.mark.asyncio
async def test_who_is_not_refused_waits_for_room() -> None:
    held = HeldMedia(100, refuses=False)
    holdings = [held.holding() for _ in range(3)]
    await held.room()
    for each in holdings:
        each.take(10**12)
    assert held.num_bytes == 3 * 10**12
    waiting = asyncio.create_task(held.room())
    for each in holdings:
        await asyncio.sleep(0.05)
        assert not waiting.done()
        each.release()
    await asyncio.wait_for(waiting, PATIENCE_S)


@pytest.mark.asyncio
async def test_room_is_given_in_order() -> None:
    """What comes later may be of no use before what came earlier: nobody would ever give anything back."""
    held, holding, order = HeldMedia(100, refuses=False), None, list[int]()

    async def begin(number: int) -> None:
        nonlocal holding
        await asyncio.sleep(0.005 * number)
        await held.room()
        order.append(number)
        holding = held.holding()
        holding.take(100)

    tasks = [asyncio.create_task(begin(number)) for number in range(5)]
    while len(order) < 5:
        await asyncio.sleep(0.03)
        if holding is not None:
            holding.release()
    assert order == [0, 1, 2, 3, 4]
    await asyncio.gather(*tasks)


def test_requests_share_an_item() -> None:
    held = HeldMedia(2 * MADE_UP_BYTES)
    item, first, second = made_up(1), held.holding(), held.holding()
    for each in (first, first, second):
        each.take_item(item)
    assert held.num_bytes == MADE_UP_BYTES
    second.take_item(made_up(2))
    third = held.holding()
    third.take_item(item)
    third.take_item(made_up(3).without_tensors())
    fourth = held.holding()
    fourth.take_item(item)
    with pytest.raises(OverloadedError, match=REFUSAL):
        fourth.take_item(made_up(3))
    for each in (first, second):
        each.send_items([])
    assert held.num_bytes == MADE_UP_BYTES
    third.release()
    assert held.num_bytes == 0


def test_the_same_image_twice_in_memory() -> None:
    held = HeldMedia(1_000_000)
    items, holding = [made_up(1), made_up(1)], held.holding()
    for each in items:
        holding.take_item(each)
    assert held.num_bytes == 2 * MADE_UP_BYTES


def test_what_is_sent_counts_once_until_the_last_request_with_it_ends() -> None:
    """An engine core has it for so long, whoever sent it, and however often."""
    held = HeldMedia(5 * MADE_UP_BYTES)
    first, second, third = (held.holding() for _ in range(3))
    copies = [made_up(1) for _ in range(4)]
    for number, each in enumerate((first, first, second, second)):
        each.take(7)
        each.take_item(copies[number])
    assert held.num_bytes == 4 * MADE_UP_BYTES + 28
    for each in (first, second):
        each.send_items([made_up(1), made_up(1)])
    assert held.num_bytes == MADE_UP_BYTES + 28
    for each in (first, second):
        each.give_files()
    assert held.num_bytes == MADE_UP_BYTES
    third.take_item(made_up(2))
    third.send_items([])  # it is in shared memory, say
    assert held.num_bytes == MADE_UP_BYTES
    first.release()
    assert held.num_bytes == MADE_UP_BYTES
    second.release()
    assert held.num_bytes == 0


# --- requests -----------------------------------------------------------------------------------------------------


@pytest.fixture
def loader() -> Iterator[MediaLoader]:
    """It has memory for the files of two images in data: addresses, or one and the image that it becomes."""
    settings = MediaSettings(
        allowed_domains=("localhost",),
        fetch_timeout_s=PATIENCE_S,
        loading_threads=1,
        memory_bytes=2 * len(URL) + len(FILE) + ITEM_BYTES,
    )
    loader = MediaLoader(WatchedProcessor(), settings, PreparedMedia(CachePlacement(Placement.KEYS, 1 << 20, 1)))
    yield loader
    loader.close()


async def supply(loader: MediaLoader, *sources: ImageSource) -> RequestSupply:
    holding = loader.held.holding()
    loaded = await loader.load(sources, TokenRoom(10_000, 10_000), holding=holding)
    places = [each.item.at(100 * index) for index, each in enumerate(loaded)]
    return RequestSupply(loader.prepared, loaded, places, holding)


def test_what_a_request_holds_and_when_it_gives_it_back(loader: MediaLoader) -> None:
    held = loader.held

    async def work() -> None:
        waiting = await supply(loader, source(URL))
        num_bytes = held.num_bytes
        assert len(URL) < num_bytes < len(URL) + ITEM_BYTES
        waiting.outgoing()
        assert held.num_bytes == num_bytes, "the engine core has it now"
        waiting.settle()
        assert 0 < held.num_bytes < ITEM_BYTES
        waiting.end()
        assert held.num_bytes == 0
        known = await supply(loader, source(URL))  # to the engine core, too
        known.outgoing()
        assert held.num_bytes == len(URL)
        known.end()
        await supply(loader, source(URL))  # it never starts
        gc.collect()
        assert held.num_bytes == 0

    asyncio.run(work())


def test_a_request_beyond_it_is_refused(loader: MediaLoader) -> None:
    """Until others have their answers."""

    async def work() -> None:
        waiting = [await supply(loader, source(URL)) for _ in range(2)]
        for each in waiting:
            each.outgoing()
        for image in (source(URL), source(url)):
            with pytest.raises(OverloadedError, match=REFUSAL):
                await supply(loader, image)
        assert 0 < loader.held.num_bytes - 2 * len(URL) < ITEM_BYTES
        waiting[0].end()
        fetched = await supply(loader, source(url))
        fetched.outgoing()
        assert loader.held.num_bytes == len(URL) + len(url) + len(picture)
        fetched.end()
        waiting[1].end()
        assert loader.held.num_bytes == 0

    picture = FILE + bytes(ITEM_BYTES + 1)  # more than is left beside two files in data: addresses
    with media_host(picture=answer(picture)) as host:
        url = host.url("/picture")
        asyncio.run(work())


def test_a_request_that_fails_holds_nothing(loader: MediaLoader) -> None:
    async def work() -> None:
        with pytest.raises(MediaError, match="no image"):
            await supply(loader, source(URL), source("data:,x", 1))
        assert loader.held.num_bytes == 0

    asyncio.run(work())


def test_programs_are_not_refused(loader: MediaLoader) -> None:
    settings = replace(loader._settings, refuses_when_full=False)
    free = MediaLoader(WatchedProcessor(), settings, loader.prepared)

    async def work() -> None:
        waiting = [await supply(free, source(URL)) for _ in range(10)]
        assert free.held.num_bytes > settings.memory_bytes
        assert len(waiting) == 10

    try:
        asyncio.run(work())
    finally:
        free.close()
