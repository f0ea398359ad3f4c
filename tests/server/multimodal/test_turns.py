"""Files that are fetched and decoded in turn."""

import asyncio

import pytest

from tokenmill_server.multimodal.sites import SitePlaces
from tokenmill_server.multimodal.turns import Turn

pytestmark = pytest.mark.asyncio


def is_free(places: SitePlaces) -> bool:
    return not places._sites


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_others_have_it_in_between() -> None:
    places = SitePlaces(1, 1)
    async with Turn(places, "request") as first, Turn(places, "request") as second:
        await first.take("b")
        await first.take("a")
        waiting = asyncio.ensure_future(second.take("a"))
        await settled()
        assert not waiting.done()
        first.give()
        first.give()
        await waiting
        assert not is_free(places)
        second.give()
        await first.take("a")
    assert is_free(places)
    await Turn(places, "request").take("a")
    assert not is_free(places)


async def test_time_stands_still_until_it_comes() -> None:
    places = SitePlaces(1, 1)
    async with Turn(places, "request") as first, Turn(places, "request") as second, asyncio.timeout(1000) as limit:
        await first.take("a", limit)
        assert limit.when() is not None
        waiting = asyncio.ensure_future(second.take("a", limit))
        await settled()
        assert limit.when() is None
        first.give()
        await waiting
        end = limit.when()
        assert end is not None
        assert 0 < end - asyncio.get_running_loop().time() <= 1000


async def test_who_is_gone_before_takes_none() -> None:
    places = SitePlaces(1, 1)

    async def wait() -> None:
        async with Turn(places, "request") as turn:
            await turn.take("a")

    async with Turn(places, "request") as first:
        await first.take("a")
        waiting = asyncio.ensure_future(wait())
        await settled()
        waiting.cancel()
        await asyncio.wait([waiting])
        assert not is_free(places)
    assert is_free(places)
