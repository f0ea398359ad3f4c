"""Work that several requests want at the same time is done once, and for as long as one of them waits for it."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from tokenmill_server.multimodal.asking import Admit, Check, NobodyHasRoomError
from tokenmill_server.multimodal.items import PreparedItem

Work = Callable[[Admit, Check], Coroutine[Any, Any, PreparedItem]]


class Waiter(Protocol):
    """A request's wish for an item. It may be asked from any thread."""

    def take(self, num_tokens: int) -> bool:
        """The item has so many tokens. Whether the request has room for them; later calls change nothing."""

    def check(self) -> None:
        """Raises what the client is to be told if `take` said no."""


class Flights:
    """What is being prepared in this process. Used from the event loop alone."""

    def __init__(self) -> None:
        self._flights: dict[bytes, _Flight] = {}

    async def join(self, name: bytes, waiter: Waiter, work: Work) -> tuple[PreparedItem, bool]:
        """What `work` yields, or who has begun it under the same name before; and whether the latter. If all who wait
        are cancelled, so is the work.

        Raises what `work` does, to all who wait, and what `waiter` does.
        """
        while True:
            flight = self._flights.get(name)
            has_joined = flight is not None
            if flight is None:
                flight = self._flights[name] = _Flight(work)
            try:
                return await self._wait(name, flight, waiter), has_joined
            except NobodyHasRoomError:
                waiter.check()  # who came late may have room, and begins again

    async def _wait(self, name: bytes, flight: "_Flight", waiter: Waiter) -> PreparedItem:
        flight.add(waiter)
        try:
            waiter.check()
            await asyncio.wait([flight.task])  # which goes on if this one is cancelled
            item = flight.task.result()
        finally:
            flight.remove(waiter)
            if (flight.task.done() or flight.is_deserted) and self._flights.get(name) is flight:
                del self._flights[name]
            if flight.is_deserted:
                flight.task.cancel()
        waiter.check()
        return item


class _Flight:
    """One work, and who waits for it."""

    def __init__(self, work: Work) -> None:
        self._waiters: list[Waiter] = []
        self._num_tokens: int | None = None
        self._lock = threading.Lock()
        self.task = asyncio.get_running_loop().create_task(work(self._admit, self._check))

    @property
    def is_deserted(self) -> bool:
        return not self._waiters

    def add(self, waiter: Waiter) -> None:
        with self._lock:
            self._waiters.append(waiter)
            num_tokens = self._num_tokens
        if num_tokens is not None:
            waiter.take(num_tokens)

    def remove(self, waiter: Waiter) -> None:
        with self._lock:
            self._waiters.remove(waiter)

    def _admit(self, num_tokens: int) -> None:
        with self._lock:
            self._num_tokens = num_tokens
            waiters = list(self._waiters)
        have_room = [waiter.take(num_tokens) for waiter in waiters]  # all are asked
        if not any(have_room):
            raise NobodyHasRoomError

    def _check(self) -> None:
        if self.is_deserted:
            raise NobodyHasRoomError
