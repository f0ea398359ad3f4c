"""What is being loaded for requests that have not reached an engine core, so that it can be given up when the server
ends: a host may take longer to answer than there is time."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from tokenmill_engine.errors import TokenmillError

T = TypeVar("T")


class UnderWay:
    """Of one process."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reason: TokenmillError | None = None

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns. Raises what it raises, or what `give_up` was told."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        if self._reason is not None:
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            # Both may be cancelled: then the caller has no use for a reason.
            if self._reason is None or (current is not None and current.cancelling()):
                raise
            raise self._reason from None
        finally:
            self._tasks.discard(task)
            del task  # what it raised refers to this function, and would live on with all that it came through

    def give_up(self, reason: TokenmillError) -> None:
        """Nothing is waited for any more, now or later."""
        self._reason = reason
        for task in self._tasks:
            task.cancel()
