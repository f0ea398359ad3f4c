"""Work that is done for as long as its client is there."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest
from fastapi import Request
from starlette.types import Message

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_server.routes.replying import ClientGoneError, while_connected


class Body(str):
    """Of which one can tell when it is gone."""


@pytest.fixture(autouse=True)
def no_search_for_cycles() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def refuse(body: Body) -> None:
    raise InvalidRequestError(f"{body} is bad")


async def answer(body: Body) -> str:
    """Late, within the time that the client gives it."""
    async with asyncio.timeout(600) as limit:
        await asyncio.Event().wait()
    return f"{body} {limit}"


async def stays() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def leaves() -> Message:
    return {"type": "http.disconnect"}


def test_a_refused_body_is_gone_with_its_refusal() -> None:
    async def main() -> None:
        body = Body("text")
        alive = weakref.ref(body)
        with pytest.raises(InvalidRequestError, match="text is bad") as raised:
            await while_connected(Request({"type": "http"}, stays), refuse(body))
        del raised, body
        await asyncio.sleep(0)
        assert alive() is None

    asyncio.run(main())


def test_a_body_is_gone_with_its_client() -> None:
    async def main() -> None:
        body, turns = Body("text"), 0
        alive = weakref.ref(body)
        with pytest.raises(ClientGoneError) as raised:
            await while_connected(Request({"type": "http"}, leaves), answer(body))
        del raised, body
        while alive() is not None and turns < 100:  # what is cancelled ends in one of the next
            await asyncio.sleep(0)
            turns += 1
        assert alive() is None

    asyncio.run(main())


def test_who_is_cancelled_while_the_client_stays_is_cancelled() -> None:
    async def main() -> None:
        request = Request({"type": "http"}, stays)
        task = asyncio.create_task(while_connected(request, answer(Body("text"))))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_who_is_cancelled_as_the_client_leaves_is_cancelled() -> None:
    async def main() -> None:
        request = Request({"type": "http"}, leaves)
        task = asyncio.create_task(while_connected(request, answer(Body("text"))))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_work_that_fails_because_its_client_left_is_a_client_that_left() -> None:
    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise InvalidRequestError("closed")

    async def main() -> None:
        with pytest.raises(ClientGoneError):
            await while_connected(Request({"type": "http"}, leaves), work())
        await asyncio.sleep(0.01)  # nothing of it cancels what comes later

    asyncio.run(main())


def test_a_client_that_leaves_with_its_answer_does_not_disturb_what_follows() -> None:
    async def main() -> None:
        left = asyncio.Event()

        async def leaves_then() -> Message:
            await left.wait()
            return {"type": "http.disconnect"}

        async def work() -> str:
            await asyncio.sleep(0.01)
            left.set()
            return "done"

        assert await while_connected(Request({"type": "http"}, leaves_then), work()) == "done"
        await asyncio.sleep(0.01)

    asyncio.run(main())
