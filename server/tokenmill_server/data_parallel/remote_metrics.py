"""An API server's request for the metrics of engine cores on other machines, which only the launcher can fetch."""

import asyncio
import contextlib
from collections.abc import Callable

_TIMEOUT_S = 1.0
"""A launcher that does not answer in time is shown as it was heard last."""


class RemoteMetrics:
    """Belongs to one event loop."""

    def __init__(self, ask: Callable[[int], None]) -> None:
        """`ask` sends the launcher a request with this number; `fetched` is called with it when that is done."""
        self._ask = ask
        self._last_number = 0
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def fetch(self) -> None:
        """Returns when the folder of metrics has what all engine cores have counted until now."""
        self._last_number += 1
        number = self._last_number
        self._waiting[number] = asyncio.get_running_loop().create_future()
        self._ask(number)
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._waiting[number], _TIMEOUT_S)
        finally:
            del self._waiting[number]

    def fetched(self, number: int) -> None:
        """The launcher has answered."""
        future = self._waiting.get(number)
        if future is not None and not future.done():
            future.set_result(None)
