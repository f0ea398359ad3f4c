"""Failures of media that leave nothing in memory.

An exception refers to all functions that it came through, with what they had: files, and whole requests. Where one of
them has a task which failed with it, all of that lives on until Python looks for cycles, which a server does rarely:
a few damaged files would take all memory.
"""

import asyncio
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from tokenmill_engine.errors import TokenmillError

T = TypeVar("T")


async def together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What they return. If one fails, or the caller is cancelled, the others are given up.

    Raises what the first one raised.
    """
    group, tasks = asyncio.TaskGroup(), list[asyncio.Task[T]]()
    try:
        async with group:
            tasks += [group.create_task(work) for work in works]
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
