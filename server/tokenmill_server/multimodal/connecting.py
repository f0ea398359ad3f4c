"""Connects to a host of several addresses, some of which may not answer at all (RFC 8305): the next is tried while the
one before is still silent, and the first connection is taken."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Attempt = Callable[[], Coroutine[Any, Any, Connection]]

_HEAD_START_S = 0.3


async def first_to_connect(attempts: Sequence[Attempt]) -> Connection:
    """What the first of `attempts` yields that does not fail. The others are given up.

    Raises what the last one raised if all fail.
    """
    left = deque(attempts)
    running: set[asyncio.Task[Connection]] = set()
    failure: BaseException = OSError("there is no address to connect to")
    try:
        while left or running:
            if left:
                running.add(asyncio.create_task(left.popleft()()))
            done, _ = await asyncio.wait(
                running, timeout=_HEAD_START_S if left else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                running.discard(task)
                error = task.exception()
                if error is None:
                    running |= done - {task}  # one that won at the same time
                    return task.result()
                failure = error
    finally:
        for task in running:
            task.cancel()
            task.add_done_callback(_abort)
    raise failure


def _abort(task: "asyncio.Task[Connection]") -> None:
    """It may have connected before it was told not to."""
    if not task.cancelled() and task.exception() is None:
        _, writer = task.result()
        writer.transport.abort()
