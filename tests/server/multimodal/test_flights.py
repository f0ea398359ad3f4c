"""Work that several want is done once, as long as one of them waits."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from tests.support.prepared_items import made_up
from tokenmill_engine.errors import ContextLengthError
from tokenmill_server.multimodal.asking import Admit, Asking, Check, NobodyHasRoomError
from tokenmill_server.multimodal.errors import MediaError
from tokenmill_server.multimodal.flights import Flights, Waiter
from tokenmill_server.multimodal.items import PreparedItem
from tokenmill_server.multimodal.loader import RoomFor, TokenRoom
from tokenmill_server.multimodal.placement import CachePlacement, Placement
from tokenmill_server.multimodal.prepared import PreparedMedia

pytestmark = pytest.mark.asyncio


def waiter(room: int = 1000) -> Waiter:
    return RoomFor(TokenRoom(room, 1000), "param")


class Kitchen:
    """Prepares item 1, which has 4 tokens, when told to."""

    def __init__(self) -> None:
        self.flights = Flights()
        self.go_on = asyncio.Event()
        self.admits = asyncio.Event()
        self.num_begun = self.num_ended = self.num_cancelled = 0
        self.failure: Exception | None = None

    async def work(self, admit: Admit, check: Check) -> PreparedItem:
        self.num_begun += 1
        try:
            await self.admits.wait()
            admit(4)
            await self.go_on.wait()
            if self.failure is not None:
                raise self.failure
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        self.num_ended += 1
        return made_up(1)

    def join(self, who: Waiter | None = None) -> "asyncio.Task[tuple[PreparedItem, bool]]":
        return asyncio.ensure_future(self.flights.join(b"name", who or waiter(), self.work))


async def turns() -> None:
    """Everything that can go on does."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_once_for_all_who_come_meanwhile() -> None:
    kitchen = Kitchen()
    kitchen.admits.set()
    tasks = [kitchen.join() for _ in range(5)]
    await turns()
    kitchen.go_on.set()
    assert [(await task)[1] for task in tasks] == [False, True, True, True, True]
    assert len({id(task.result()[0]) for task in tasks}) == 1
    assert kitchen.num_begun == 1
    assert (await kitchen.join())[1] is False
    assert kitchen.num_begun == 2


async def test_it_goes_on_without_whoever_began_it() -> None:
    kitchen = Kitchen()
    kitchen.admits.set()
    first, second = kitchen.join(), kitchen.join()
    await turns()
    first.cancel()
    await turns()
    kitchen.go_on.set()
    assert (await second)[0] == made_up(1)
    assert (first.cancelled(), kitchen.num_begun, kitchen.num_cancelled) == (True, 1, 0)


async def test_it_ends_when_nobody_waits_and_begins_anew_for_the_next() -> None:
    kitchen = Kitchen()
    tasks = [kitchen.join(), kitchen.join()]
    await turns()
    for task in tasks:
        task.cancel()
    await turns()
    later = kitchen.join()
    kitchen.admits.set()
    kitchen.go_on.set()
    assert (await later)[1] is False
    assert (kitchen.num_begun, kitchen.num_cancelled, kitchen.num_ended) == (2, 1, 1)


async def test_a_failure_is_everybodys_and_is_not_remembered() -> None:
    kitchen = Kitchen()
    kitchen.failure = MediaError("damaged")
    kitchen.admits.set()
    kitchen.go_on.set()
    tasks = [kitchen.join(), kitchen.join()]
    for task in tasks:
        with pytest.raises(MediaError, match="damaged"):
            await task
    kitchen.failure = None
    assert (await kitchen.join())[0] == made_up(1)


async def test_who_has_no_room_is_refused_alone() -> None:
    kitchen = Kitchen()
    small, large, late = kitchen.join(waiter(3)), kitchen.join(waiter()), None
    await turns()
    kitchen.admits.set()
    await turns()
    late = kitchen.join(waiter(3))
    with pytest.raises(ContextLengthError):
        await late
    kitchen.go_on.set()
    with pytest.raises(ContextLengthError):
        await small
    assert (await large)[0] == made_up(1)
    assert kitchen.num_begun == 1


async def test_what_nobody_has_room_for_is_not_prepared() -> None:
    kitchen = Kitchen()
    tasks = [kitchen.join(waiter(3)), kitchen.join(waiter(2))]
    await turns()
    kitchen.admits.set()
    for task in tasks:
        with pytest.raises(ContextLengthError):
            await task
    kitchen.go_on.set()
    assert kitchen.num_ended == 0
    assert (await kitchen.join(waiter(4)))[0] == made_up(1)


async def test_who_comes_late_to_what_nobody_had_room_for_begins_anew() -> None:
    kitchen = Kitchen()
    refused = kitchen.join(waiter(3))
    await turns()
    kitchen.admits.set()
    kitchen.go_on.set()
    # The work fails in this turn; whoever waits hears of it in the next.
    late: asyncio.Task[tuple[PreparedItem, bool]] | None = None

    def come() -> None:
        nonlocal late
        late = kitchen.join(waiter())

    asyncio.get_running_loop().call_soon(come)
    with pytest.raises(ContextLengthError):
        await refused
    await turns()
    assert late is not None
    assert (await late)[0] == made_up(1)


@pytest.mark.parametrize("name", [b"a name", None])
@pytest.mark.parametrize("placement", [Placement.KEYS, Placement.NOWHERE])
async def test_work_that_takes_long_learns_that_nobody_waits(placement: Placement, name: bytes | None) -> None:
    media = PreparedMedia(CachePlacement(placement, 1 << 20, 1))
    begun, gone, ended = threading.Event(), threading.Event(), threading.Event()

    def prepare(asking: Asking) -> PreparedItem:
        asking.check()
        asking.admit(7)
        asking.admit(7)  # takes no more room
        begun.set()
        gone.wait()
        with pytest.raises(NobodyHasRoomError):
            asking.admit(7)
        try:
            asking.check()
        except NobodyHasRoomError:
            ended.set()
        return made_up(1)

    async def in_thread(work: Callable[[], PreparedItem]) -> PreparedItem:
        return await asyncio.to_thread(work)

    task = asyncio.ensure_future(media.prepare(name, waiter(10), prepare, in_thread))
    try:
        async with asyncio.timeout(60):
            while not begun.is_set():
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.wait([task])
            gone.set()
            while not ended.is_set():
                await asyncio.sleep(0.001)
    finally:
        gone.set()
