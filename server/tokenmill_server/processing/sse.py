"""Server-sent events, and the buffer between generations and one HTTP connection.

Chunks are pasted from pieces rendered once per stream and the JSON of the new text: no model object per token.
"""

import asyncio
from typing import Any

import msgspec

from tokenmill_engine.errors import TokenmillError

DONE = b"data: [DONE]\n\n"

json_bytes = msgspec.json.Encoder().encode


def event(body: Any) -> bytes:
    """One event whose data is `body` as JSON."""
    return b"data: %b\n\n" % json_bytes(body)


class EventBuffer:
    """Bytes that wait to be sent to one client. Written from the event loop, read by one task.

    Nothing limits it but the tokens that the request may generate: a slow reader does not slow the engine.
    """

    __slots__ = ("_chunks", "_loop", "_waiter", "closed", "error")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._chunks: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self.closed = False
        """No more is to come."""
        self.error: TokenmillError | None = None
        """Why it was closed before its end."""

    def write(self, data: bytes) -> None:
        if not data:  # an empty read means the end
            return
        self._chunks.append(data)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def close(self, error: TokenmillError | None = None) -> None:
        self.closed = True
        self.error = error
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def read(self) -> bytes:
        """What has been written since the last read, as soon as there is something; nothing once closed and empty."""
        if not self._chunks and not self.closed:
            self._waiter = self._loop.create_future()
            await self._waiter
            self._waiter = None
        chunks, self._chunks = self._chunks, []
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)
