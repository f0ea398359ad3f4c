"""Files are fetched and decoded a few at a time. What waits for its turn does not time out."""

import asyncio
from types import TracebackType
from typing import Self


class Turn:
    """Of one file. It may be given to others in between."""

    def __init__(self, places: asyncio.Semaphore) -> None:
        self._places = places
        self._is_ours = False

    async def take(self, limit: asyncio.Timeout | None = None) -> None:
        """Waits for it, while the time that is left until `limit` stands still."""
        if self._is_ours:
            return
        now = asyncio.get_running_loop().time
        end = None if limit is None else limit.when()
        if limit is None or end is None:
            await self._places.acquire()
        else:
            left = end - now()
            limit.reschedule(None)
            await self._places.acquire()
            limit.reschedule(now() + left)
        self._is_ours = True

    def give(self) -> None:
        """Others have it until it is taken again."""
        if self._is_ours:
            self._is_ours = False
            self._places.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.give()
