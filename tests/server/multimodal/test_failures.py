"""What failed leaves nothing in memory, also where nobody looks for cycles."""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.support.media_host import answer, media_host
from tests.support.pictures import data_url
from tests.support.prepared_items import WatchedProcessor
from tests.support.server import PATIENCE_S
from tokenmill_engine.errors import InvalidRequestError
from tokenmill_server.multimodal.failures import together
from tokenmill_server.multimodal.fetch import _Answer
from tokenmill_server.multimodal.flights import _Flight
from tokenmill_server.multimodal.loader import MediaLoader, TokenRoom
from tokenmill_server.multimodal.parts import ImageSource
from tokenmill_server.multimodal.placement import CachePlacement, Placement
from tokenmill_server.multimodal.prepared import PreparedMedia
from tokenmill_server.multimodal.settings import MediaSettings
from tokenmill_server.multimodal.under_way import UnderWay

DAMAGED = b"\x89PNG\r\n\x1a\n" + bytes(1000)


class Text(str):
    """Of which one can tell when it is gone."""


@pytest.fixture(autouse=True)
def no_search_for_cycles() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def num_alive() -> int:
    """Objects that have files."""
    return sum(type(each) in (_Answer, _Flight) for each in gc.get_objects())


async def fail(body: Text, error: Exception) -> None:
    await asyncio.sleep(0)
    raise error


async def hang(body: Text) -> None:
    async with asyncio.timeout(PATIENCE_S) as limit:
        assert limit is not None
        await asyncio.Event().wait()


def test_what_works_together() -> None:
    async def double(number: int) -> int:
        await asyncio.sleep(0)
        return 2 * number

    assert asyncio.run(together(double(number) for number in range(3))) == [0, 2, 4]
    assert asyncio.run(together([])) == []


def test_a_failure_and_those_given_up_with_it() -> None:
    async def main() -> None:
        bodies = [Text("long"), Text("longer")]
        alive = [weakref.ref(body) for body in bodies]
        with pytest.raises(InvalidRequestError, match="bad") as raised:
            await together([fail(bodies[0], InvalidRequestError("bad")), hang(bodies[1])])
        del raised, bodies
        await asyncio.sleep(0)
        assert [each() for each in alive] == [None, None]

    asyncio.run(main())


def test_a_caller_who_is_cancelled() -> None:
    async def main() -> None:
        async def request(body: Text) -> None:
            await UnderWay().wait(together([hang(body)]))

        body = Text("long")
        alive = weakref.ref(body)
        task = asyncio.create_task(request(body))
        del body
        await asyncio.sleep(0.01)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        del task
        await asyncio.sleep(0)
        assert alive() is None

    asyncio.run(main())


def test_faults_of_ours_say_where_they_are() -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="fault") as raised:
            await together([fail(Text(), ValueError("fault"))])
        assert [entry.name for entry in raised.traceback][-1] == "fail"

    asyncio.run(main())


@pytest.mark.parametrize("page", ["/damaged", "/missing", None])
def test_a_file_that_cannot_be_used(page: str | None) -> None:
    settings = MediaSettings(loading_threads=1, allowed_domains=("localhost",), fetch_timeout_s=PATIENCE_S)
    prepared = PreparedMedia(CachePlacement(Placement.KEYS, 1 << 20, 1))
    loader, under_way = MediaLoader(WatchedProcessor(), settings, prepared), UnderWay()

    async def request(url: str, room: TokenRoom) -> str:
        try:
            await under_way.wait(loader.load([ImageSource(url, "auto", "messages")], room))
        except InvalidRequestError as error:
            return str(error)
        raise AssertionError("it was not refused")

    async def main() -> None:
        num_before = num_alive()
        room = TokenRoom(100, 100)  # which is the request's own
        alive = weakref.ref(room)
        assert await request(data_url(DAMAGED) if page is None else host.url(page), room)
        del room
        await asyncio.sleep(0)
        assert alive() is None
        assert num_alive() <= num_before

    with media_host(damaged=answer(DAMAGED)) as host:
        asyncio.run(main())
    loader.close()
