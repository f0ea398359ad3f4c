"""Server-sent events, and the buffer between generations and one HTTP connection.

Chunks are pasted from pieces rendered once per stream and the JSON of the new text: no model object per token.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from tokenmill_engine.errors import TokenmillError

DONE = b"data: [DONE]\n\n"

Sink = Callable[[bytes], bool]
"""Takes bytes at once, or refuses them (False)."""

_encode = msgspec.json.Encoder().encode

_LINE_SEPARATORS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
"""UTF-8 of the characters that Unicode, but not JSON, counts as ends of lines, and how JSON may write them."""


def json_bytes(value: Any) -> bytes:
    """JSON that stays on one line also for clients that split lines as Unicode does (httpx's `iter_lines` is one)."""
    encoded = _encode(value)
    if not encoded.isascii():
        for raw, escaped in _LINE_SEPARATORS:
            encoded = encoded.replace(raw, escaped)
    return encoded


def event(body: Any) -> bytes:
    """One event whose data is `body` as JSON."""
    return b"data: %b\n\n" % json_bytes(body)


class EventBuffer:
    """Bytes on their way to one client. Written from the event loop, read by one task.

    While a `sink` takes them at once nothing is stored and nobody is woken. Nothing limits what is stored but the
    tokens that the request may generate: a slow reader does not slow the engine.
    """

    __slots__ = ("_chunks", "_loop", "_sink", "_waiter", "closed", "error", "num_written")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._chunks: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self.num_written = 0
        """Writes so far."""
        self.closed = False
        """No more is to come."""
        self.error: TokenmillError | None = None
        """Why it was closed before its end."""

    def write(self, data: bytes) -> None:
        """Passes `data` on, or stores it. It must not be empty: an empty chunk would end the response."""
        self.num_written += 1
        if self._sink is not None:
            if self._sink(data):
                return
            self._sink = None  # what comes later must not overtake this
        self._chunks.append(data)
        self._wake()

    def finish(self, data: bytes) -> None:
        """The last bytes. They wait for the reader, who sends them in one piece with the end of the response."""
        self._chunks.append(data)
        self.close()

    def close(self, error: TokenmillError | None = None) -> None:
        self.closed = True
        self.error = error
        self._sink = None
        self._wake()

    def attach(self, sink: Sink) -> None:
        """Lets `sink` have what is written from now on, until it refuses. No-op while older bytes wait."""
        if not self._chunks and not self.closed:
            self._sink = sink

    async def read(self) -> bytes:
        """What has been stored since the last read, as soon as there is something; nothing once closed and empty."""
        if not self._chunks and not self.closed:
            self._waiter = self._loop.create_future()
            await self._waiter
            self._waiter = None
        chunks, self._chunks = self._chunks, []
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
