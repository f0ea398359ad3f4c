"""Failures of media that leave nothing in memory.

An exception refers to all functions that it came through, with what they had: files, and whole requests. Where one of
them has a task which failed with it, all of that lives on until Python looks for cycles, which a server does rarely:
a few damaged files would take all memory.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from tokenmill_engine.errors import TokenmillError

T = TypeVar("T")


async def together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What they return. If one fails, or the caller is cancelled, the others are given up.

    Raises what the first one raised.
    """
    return await together_as_they_come(_at_once(works))


async def together_as_they_come(works: AsyncIterator[Coroutine[Any, Any, T]]) -> list[T]:
    """As `together`, of works that begin when they come. If one fails, no more are asked for.

    Raises also what asking for them does.
    """
    group, tasks = asyncio.TaskGroup(), list[asyncio.Task[T]]()
    try:
        async with group:
            async for work in works:
                tasks.append(group.create_task(work))
        return [task.result() for task in tasks]
    except asyncio.CancelledError as cancelled:
        cancelled.__traceback__ = None
        raise
    except BaseExceptionGroup as failures:
        failure = failures.exceptions[0]
        failures.__traceback__ = None
    finally:
        tell(*tasks)
        del group, tasks
    # Not up there, where it would refer to the group, which refers to it.
    try:
        raise forgetful(failure)
    finally:
        del failure


async def in_order(works: Iterable[Coroutine[Any, Any, T]], most: int) -> AsyncIterator[T]:
    """What they return, one after the other, while at most so many are under way. At the end the others are given up.

    Raises what one does, in its turn.
    """
    under_way: deque[asyncio.Task[T]] = deque()
    try:
        for work in works:
            if len(under_way) == most:
                yield await under_way.popleft()
            under_way.append(asyncio.create_task(work))
        while under_way:
            yield await under_way.popleft()
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        tell(*under_way)
        under_way.clear()


async def _at_once(works: Iterable[Coroutine[Any, Any, T]]) -> AsyncIterator[Coroutine[Any, Any, T]]:
    for work in works:
        yield work


def tell(*tasks: asyncio.Future[Any]) -> None:
    """Has tasks that have ended let go of what they raised, which each does when it has told that once."""
    for task in tasks:
        with suppress(BaseException):
            task.result()


def forgetful(failure: BaseException) -> BaseException:
    """The same, without what it came through if that is of no interest: it is told to a client as it is."""
    each: BaseException | None = failure
    if not isinstance(failure, TokenmillError):
        return failure  # a fault of ours, which is logged
    while each is not None:
        each.__traceback__ = None
        cause, each.__cause__, each.__context__ = each.__cause__ or each.__context__, None, None
        each = cause
    return failure
