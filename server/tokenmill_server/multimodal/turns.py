"""Files are fetched and decoded a few at a time. What waits for its turn does not time out."""

import asyncio
from collections.abc import Hashable
from types import TracebackType
from typing import Self

from tokenmill_server.multimodal.sites import SitePlaces


class Turn:
    """Of one file. It may be given to others in between."""

    def __init__(self, places: SitePlaces, owner: Hashable) -> None:
        """`owner`: whose file it is. Who waits for many lets others come between."""
        self._places = places
        self._owner = owner
        self._site: str | None = None
        """Whose place it has."""

    async def take(self, site: str, limit: asyncio.Timeout | None = None) -> None:
        """Waits for it among files of one site, while the time that is left until `limit` stands still. What it was
        given before is over."""
        self.give()
        now = asyncio.get_running_loop().time
        end = None if limit is None else limit.when()
        if limit is None or end is None:
            await self._places.acquire(site, self._owner)
        else:
            left = end - now()
            limit.reschedule(None)
            await self._places.acquire(site, self._owner)
            limit.reschedule(now() + left)
        self._site = site

    def give(self) -> None:
        """Others have it until it is taken again."""
        if self._site is not None:
            self._places.release(self._site, self._owner)
            self._site = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.give()
