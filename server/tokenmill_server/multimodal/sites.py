"""Places for work that waits for hosts. One site has only some of them, so that one whose servers are slow, or whose
name servers are, keeps no other waiting."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Hashable
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
    """Used from the event loop alone. A site's next free place goes to that owner who has the fewest of them, and among
    these to who waited longest: one request for fifty files keeps those behind it waiting for a place, not for all of
    its files."""

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

    async def acquire(self, name: str, owner: Hashable = None) -> None:
        """Waits for one of a site's, and then of all."""
        site = self._sites.setdefault(name, _Site(self._most_of_site))
        site.num_users += 1
        try:
            await site.take(owner)
            try:
                await self._places.acquire()
            except BaseException:
                site.give(owner)
                raise
        except BaseException:
            self._leave(name)
            raise

    def release(self, name: str, owner: Hashable = None) -> None:
        self._places.release()
        self._sites[name].give(owner)
        self._leave(name)

    def _leave(self, name: str) -> None:
        self._sites[name].num_users -= 1
        if self._sites[name].num_users == 0:
            del self._sites[name]


class _Site:
    """Who has places or waits for one."""

    def __init__(self, most: int) -> None:
        self.num_users = 0
        self._num_free = most
        self._taken: Counter[Hashable] = Counter()
        """By owner."""
        self._waiting: list[tuple[Hashable, asyncio.Future[None]]] = []

    async def take(self, owner: Hashable) -> None:
        if self._num_free > 0:
            self._num_free -= 1
            self._taken[owner] += 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((owner, place))
        try:
            await place
        except BaseException:
            if place.cancelled():
                self._waiting.remove((owner, place))
            else:  # it came in the same moment
                self.give(owner)
            raise

    def give(self, owner: Hashable) -> None:
        self._taken[owner] -= 1
        if self._taken[owner] == 0:
            del self._taken[owner]
        waiting = [each for each in self._waiting if not each[1].done()]
        if not waiting:
            self._num_free += 1
            return
        following = min(waiting, key=lambda each: self._taken[each[0]])
        self._waiting.remove(following)
        self._taken[following[0]] += 1
        following[1].set_result(None)
