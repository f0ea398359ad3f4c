"""Looks up addresses of hosts, each name in a thread of its own.

The event loop's own threads would do it as well, but there are few: a handful of names whose servers do not answer,
each for half a minute, would keep everything else that wants one of these threads waiting. Nobody can stop a lookup, so
its place is free again when it has ended, and not when who wanted it is gone. The process does not wait for any to end.

Names of one site share a few places, since most likely the same servers know them: a site whose servers are slow keeps
no other waiting. Whoever wants a name that is being looked up waits for the same lookup.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from tokenmill_server.multimodal.sites import SitePlaces, site_of

_MAX_LOOKUPS = 256
"""At a time; the next waits."""
_MAX_OF_SITE = 8

_lookups: "WeakKeyDictionary[asyncio.AbstractEventLoop, _Lookups]" = WeakKeyDictionary()


async def look_up(host: str, port: int) -> list[str]:
    """Addresses of a host as text, each once, in the order in which they are to be tried.

    Raises OSError or UnicodeError if there are none.
    """
    with contextlib.suppress(socket.gaierror):  # it is a name
        return _texts(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST))
    return await _lookups.setdefault(asyncio.get_running_loop(), _Lookups()).find(host, port)


class _Lookups:
    """Of one event loop."""

    def __init__(self) -> None:
        self._places = SitePlaces(_MAX_LOOKUPS, _MAX_OF_SITE)
        self._running: dict[str, _Lookup] = {}

    async def find(self, host: str, port: int) -> list[str]:
        """As `look_up`. A lookup that nobody waits for any more does not begin."""
        lookup = self._running.get(host)
        if lookup is None:
            lookup = self._running[host] = _Lookup()
            lookup.task = asyncio.create_task(self._look_up(lookup, host, port))
            lookup.task.add_done_callback(_is_seen)
        assert lookup.task is not None
        lookup.num_waiting += 1
        try:
            return await asyncio.shield(lookup.task)
        finally:
            lookup.num_waiting -= 1
            if lookup.num_waiting == 0 and not lookup.has_begun:
                lookup.task.cancel()
                if self._running.get(host) is lookup:
                    del self._running[host]

    async def _look_up(self, lookup: "_Lookup", host: str, port: int) -> list[str]:
        try:
            async with self._places.of(site_of(host)):
                lookup.has_begun = True
                return await _in_thread(host, port)
        finally:
            if self._running.get(host) is lookup:
                del self._running[host]


class _Lookup:
    """Of one name."""

    def __init__(self) -> None:
        self.task: asyncio.Task[list[str]] | None = None
        self.num_waiting = 0
        self.has_begun = False


async def _in_thread(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    found: asyncio.Future[list[str]] = loop.create_future()

    def settle(addresses: list[str] | None, error: Exception | None) -> None:
        if found.cancelled():
            return
        if error is not None:
            found.set_exception(error)
        else:
            found.set_result(addresses or [])

    def work() -> None:
        addresses: list[str] | None = None
        failure: Exception | None = None
        try:
            addresses = _addresses(host, port)
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop may be gone by now
            loop.call_soon_threadsafe(settle, addresses, failure)

    try:
        threading.Thread(target=work, name="media-name", daemon=True).start()
    except RuntimeError as error:  # the machine has no thread left
        raise OSError("no thread to look the name up in") from error
    return await found


def _addresses(host: str, port: int) -> list[str]:
    return _texts(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))


def _texts(entries: Sequence[tuple[Any, ...]]) -> list[str]:
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def _is_seen(task: "asyncio.Task[list[str]]") -> None:
    """Whoever wanted to know may be gone."""
    if not task.cancelled():
        task.exception()
