"""One socket write per connection and turn of the event loop, however many pieces an answer came in.

uvloop hands every piece to the kernel as soon as it is written, and that system call is most of what a streamed token
costs. Here pieces wait until the turn is over, or until somebody who has just written to many connections says so. A
turn in which many answers begin is long, so only a few connections wait for its end.
"""

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

logger = logging.getLogger(__name__)

Data = bytes | bytearray | memoryview

_MAX_WAITING = 8
"""Connections whose bytes wait for the end of a turn."""


class WriteBatch:
    """The transports that hold bytes for the end of this turn."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: list[BatchedTransport] = []
        self._is_gathering = False

    def gather(self) -> None:
        """Who calls this flushes the batch in this turn, so nothing else needs to."""
        self._is_gathering = True

    def add(self, transport: "BatchedTransport") -> None:
        """`transport` has begun to hold bytes."""
        if not self._waiting and not self._is_gathering:
            self._loop.call_soon(self.flush)
        self._waiting.append(transport)

    def limit(self) -> None:
        """Does not let many wait."""
        if len(self._waiting) >= _MAX_WAITING:
            self.flush()

    def flush(self) -> None:
        """Writes what all of them hold. A connection that cannot be written to is given up, not the others."""
        self._is_gathering = False
        waiting, self._waiting = self._waiting, []
        for transport in waiting:
            try:
                transport.flush()
            except Exception:
                logger.exception("a connection could not be written to; it is closed")
                transport.abort()


class BatchedTransport(asyncio.Transport):
    """The transport of a connection whose writes wait for their batch. Everything else goes straight through.

    `hold` is for whoever writes to many connections and flushes the batch then: it may wait together with any number.
    """

    def __init__(self, transport: asyncio.Transport, batch: WriteBatch) -> None:
        super().__init__()
        self._transport = transport
        self._batch = batch
        self._pieces: list[Data] = []

    def hold(self, data: Data) -> None:
        """Writes `data` with the next flush of the batch."""
        if not self._pieces:
            self._batch.add(self)
        self._pieces.append(data)

    def write(self, data: Data) -> None:
        self.hold(data)
        self._batch.limit()

    def writelines(self, list_of_data: Iterable[Data]) -> None:
        for data in list_of_data:
            self.write(data)

    def flush(self) -> None:
        """Writes what waits, unless the connection is gone."""
        pieces, self._pieces = self._pieces, []
        if pieces and not self._transport.is_closing():
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self._pieces.clear()
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def is_reading(self) -> bool:
        return self._transport.is_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transport.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size() + sum(map(len, self._pieces))

    def can_write_eof(self) -> bool:
        return self._transport.can_write_eof()

    def write_eof(self) -> None:
        self.flush()
        self._transport.write_eof()
