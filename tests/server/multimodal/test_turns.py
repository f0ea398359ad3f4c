"""Files that are fetched and decoded in turn."""

import asyncio

import pytest

from tokenmill_server.multimodal.turns import Turn

pytestmark = pytest.mark.asyncio


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_others_have_it_in_between() -> None:
    places = asyncio.Semaphore(1)
    async with Turn(places) as first, Turn(places) as second:
        await first.take()
        await first.take()
        waiting = asyncio.ensure_future(second.take())
        await settled()
        assert not waiting.done()
        first.give()
        first.give()
        await waiting
        assert places.locked()
        second.give()
        await first.take()
    assert not places.locked()
    await Turn(places).take()
    assert places.locked()


async def test_time_stands_still_until_it_comes() -> None:
    places = asyncio.Semaphore(1)
    async with Turn(places) as first, Turn(places) as second, asyncio.timeout(1000) as limit:
        await first.take(limit)
        assert limit.when() is not None
        waiting = asyncio.ensure_future(second.take(limit))
        await settled()
        assert limit.when() is None
        first.give()
        await waiting
        end = limit.when()
        assert end is not None
        assert 0 < end - asyncio.get_running_loop().time() <= 1000


async def test_who_is_gone_before_takes_none() -> None:
    places = asyncio.Semaphore(1)

    async def wait() -> None:
        async with Turn(places) as turn:
            await turn.take()

    async with Turn(places) as first:
        await first.take()
        waiting = asyncio.ensure_future(wait())
        await settled()
        waiting.cancel()
        await asyncio.wait([waiting])
        assert places.locked()
    assert not places.locked()
