"""Places, of which one site has only some."""

import asyncio

import pytest

from tokenmill_server.multimodal.sites import SitePlaces, site_of

pytestmark = pytest.mark.asyncio


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("host", "site"),
    [
        ("images", "images"),
        ("example.com", "example.com"),
        ("a.b.example.com", "example.com"),
        ("a.example.co.uk", "example.co.uk"),
        ("example.co.uk", "example.co.uk"),
        ("a.ab.de", "ab.de"),
        ("10.0.0.7", "10.0.0.7"),
        ("2001:db8::7", "2001:db8::7"),
    ],
)
async def test_sites(host: str, site: str) -> None:
    assert site_of(host) == site


async def test_one_site_leaves_places_to_others() -> None:
    places = SitePlaces(3, 2)
    waiting = [asyncio.ensure_future(places.acquire("a")) for _ in range(4)]
    await settled()
    assert [each.done() for each in waiting] == [True, True, False, False]
    await places.acquire("b")
    other = asyncio.ensure_future(places.acquire("c"))
    await settled()
    assert not other.done()
    places.release("b")
    await other
    places.release("a")
    await settled()
    assert [each.done() for each in waiting] == [True, True, True, False]
    waiting[3].cancel()
    await asyncio.wait([waiting[3]])
    for name in "aac":
        places.release(name)
    assert not places._sites


async def test_who_is_gone_before_has_none() -> None:
    """Whether it waited for a place of its site, or of all."""
    places = SitePlaces(1, 1)
    await places.acquire("a")
    waiting = [asyncio.ensure_future(places.acquire(name)) for name in "ab"]
    await settled()
    for each in waiting:
        each.cancel()
    await asyncio.wait(waiting)
    places.release("a")
    assert not places._sites
    for name in "ab":
        async with places.of(name):
            assert set(places._sites) == {name}


async def test_the_next_place_is_for_who_has_the_fewest() -> None:
    places = SitePlaces(9, 3)
    came: list[str] = []

    async def take(owner: str) -> None:
        await places.acquire("a", owner)
        came.append(owner)

    waiting = [asyncio.ensure_future(take(owner)) for owner in ("many", "many", "many", "many", "one", "two", "one")]
    await settled()
    assert came == ["many"] * 3
    gone = waiting.pop(5)
    gone.cancel()
    for owner in ("many", "many", "many", "one"):
        places.release("a", owner)
        await settled()
    assert came == ["many", "many", "many", "one", "many", "one"]
    for owner in ("one", "many"):
        places.release("a", owner)
    await asyncio.wait([*waiting, gone])
    assert not places._sites


async def test_a_place_that_comes_to_who_leaves_goes_on_to_the_next() -> None:
    places = SitePlaces(9, 1)
    await places.acquire("a", 0)
    first, second = (asyncio.ensure_future(places.acquire("a", owner)) for owner in (1, 2))
    await settled()
    places.release("a", 0)
    first.cancel()
    await asyncio.wait([first])
    await asyncio.wait_for(second, 30)
    places.release("a", 2)
    assert not places._sites
