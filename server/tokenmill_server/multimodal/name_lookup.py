"""Looks up addresses of hosts, each name in a thread of its own.

The event loop's own threads would do it as well, but there are few: a handful of names whose servers do not answer,
each for half a minute, would keep everything else that wants one of these threads waiting. Nobody can stop a lookup, so
its place is free again when it has ended, and not when who wanted it is gone. The process does not wait for any to end.
"""

import asyncio
import contextlib
import socket
import threading
from typing import Any
from weakref import WeakKeyDictionary

_MAX_LOOKUPS = 64
"""At a time; the next waits."""

_places: "WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]" = WeakKeyDictionary()


async def look_up(host: str, port: int) -> list[str]:
    """Addresses of a host as text, each once, in the order in which they are to be tried.

    Raises OSError or UnicodeError if there are none.
    """
    loop = asyncio.get_running_loop()
    places = _places.setdefault(loop, asyncio.Semaphore(_MAX_LOOKUPS))
    await places.acquire()
    found: asyncio.Future[list[str]] = loop.create_future()

    def settle(addresses: list[str] | None, error: Exception | None) -> None:
        places.release()
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
        places.release()
        raise OSError("no thread to look the name up in") from error
    return await found


def _addresses(host: str, port: int) -> list[str]:
    entries: list[tuple[Any, ...]] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))
