"""Places for work that waits for hosts. One site has only some of them, so that one whose servers are slow, or whose
name servers are, keeps no other waiting."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_PARTS_OF_COUNTRIES = frozenset({"ac", "co", "com", "edu", "go", "gov", "ne", "net", "or", "org"})
"""Where sites have three labels: example.co.uk, example.com.au."""


def site_of(host: str) -> str:
    """What of a name its owner has registered, as far as a name tells; an address as it is."""
    labels = host.split(".")
    if ":" in host or labels[-1].isdigit():
        return host
    is_of_country = len(labels) > 2 and len(labels[-1]) == 2 and labels[-2] in _PARTS_OF_COUNTRIES
    return ".".join(labels[-3 if is_of_country else -2 :])


class SitePlaces:
    """Used from the event loop alone."""

    def __init__(self, most: int, most_of_site: int) -> None:
        self._places = asyncio.Semaphore(most)
        self._most_of_site = most_of_site
        self._sites: dict[str, _Site] = {}

    @asynccontextmanager
    async def of(self, site: str) -> AsyncIterator[None]:
        """With one of them."""
        await self.acquire(site)
        try:
            yield
        finally:
            self.release(site)

    async def acquire(self, name: str) -> None:
        """Waits for one of a site's, and then of all."""
        site = self._sites.setdefault(name, _Site(self._most_of_site))
        site.num_users += 1
        try:
            await site.places.acquire()
            try:
                await self._places.acquire()
            except BaseException:
                site.places.release()
                raise
        except BaseException:
            self._leave(name)
            raise

    def release(self, name: str) -> None:
        self._places.release()
        self._sites[name].places.release()
        self._leave(name)

    def _leave(self, name: str) -> None:
        self._sites[name].num_users -= 1
        if self._sites[name].num_users == 0:
            del self._sites[name]


class _Site:
    """Who has places or waits for one."""

    def __init__(self, most: int) -> None:
        self.places = asyncio.Semaphore(most)
        self.num_users = 0
