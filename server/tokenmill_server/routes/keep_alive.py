"""Comments in streams that are silent, for proxies that close such connections (`--sse-keep-alive-interval`)."""

import asyncio

from tokenmill_server.processing.sse import EventBuffer

COMMENT = b": keep-alive\n\n"
"""Readers of server-sent events skip it."""


class KeepAlive:
    """Writes a comment whenever nothing was written for an interval, until the buffer is closed or this is stopped."""

    def __init__(self, buffer: EventBuffer, interval_s: float) -> None:
        self._buffer = buffer
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._num_written = buffer.num_written
        self._timer = self._loop.call_later(interval_s, self._tick)

    def stop(self) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        if self._buffer.closed:
            return
        if self._buffer.num_written == self._num_written:
            self._buffer.write(COMMENT)
        self._num_written = self._buffer.num_written
        self._timer = self._loop.call_later(self._interval_s, self._tick)
