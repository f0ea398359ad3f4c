"""What is being loaded, and given up."""

import asyncio

import pytest

from tokenmill_server.errors import ShuttingDownError
from tokenmill_server.multimodal.under_way import UnderWay

pytestmark = pytest.mark.asyncio

REASON = ShuttingDownError("enough")


async def seven() -> int:
    return 7


async def test_results_and_errors_pass() -> None:
    under_way = UnderWay()
    assert await under_way.wait(seven()) == 7

    async def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await under_way.wait(fails())


async def begun(under_way: UnderWay) -> tuple[asyncio.Future[None], asyncio.Event]:
    """Who waits for endless work that has begun, and whether that was cancelled."""
    began, cancelled = asyncio.Event(), asyncio.Event()

    async def endless() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    waiting = asyncio.ensure_future(under_way.wait(endless()))
    await began.wait()
    return waiting, cancelled


async def test_who_waits_is_told_why_it_ends() -> None:
    under_way = UnderWay()
    waiting, cancelled = await begun(under_way)
    under_way.give_up(REASON)
    with pytest.raises(ShuttingDownError, match="enough"):
        await waiting
    assert cancelled.is_set()
    with pytest.raises(ShuttingDownError, match="enough"):
        await under_way.wait(seven())


async def test_a_caller_that_is_cancelled_takes_its_work_along() -> None:
    under_way = UnderWay()
    waiting, cancelled = await begun(under_way)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert cancelled.is_set()
