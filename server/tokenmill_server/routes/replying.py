"""Answers that take a while: the engine stops as soon as the client is gone."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmill_server.errors import ErrorReply, describe
from tokenmill_server.http_server import call_when_gone, direct_sink
from tokenmill_server.processing.sse import EventBuffer
from tokenmill_server.routes.keep_alive import KeepAlive

T = TypeVar("T")

DIRECT_SEND = "direct_send"
"""Key of the scope's state: the HTTP server's own `send`. Every layer of an application wraps it, but none looks at
what follows the start of a response."""


class ClientGoneError(Exception):
    """Nobody is there to read the answer."""


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects (then ClientGoneError is raised)."""
    caller = asyncio.current_task()
    assert caller is not None
    is_gone = False

    def leave() -> None:
        nonlocal is_gone
        is_gone = True
        caller.cancel()

    stop_watching = _watch_client(request.receive, leave)
    try:
        return await work
    except BaseException:
        if not is_gone or caller.uncancel():  # else it is we who cancelled it, and nobody waits for what failed
            raise
        raise ClientGoneError from None
    finally:
        stop_watching()


def error_response(reply: ErrorReply) -> Response:
    return Response(reply.json(), reply.status, headers=reply.headers, media_type="application/json")


class EventStreamResponse(Response):
    """Sends what an `EventBuffer` holds. The status waits for the first event, so that an early failure is an HTTP
    error; a later one becomes the last event. `close` is called at the end, whoever caused it. With `keep_alive_s` a
    comment fills every silence of that length, and counts as the first event."""

    def __init__(
        self, buffer: EventBuffer, close: Callable[[], None], headers: dict[str, str], keep_alive_s: float = 0.0
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache", **headers})
        del self.headers["content-length"]
        self._buffer = buffer
        self._close = close
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stop_watching = _watch_client(receive, self._buffer.close)
        keep_alive = KeepAlive(self._buffer, self._keep_alive_s) if self._keep_alive_s else None
        try:
            await self._send_all(scope, receive, send)
        finally:
            stop_watching()
            if keep_alive is not None:
                keep_alive.stop()
            self._close()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        buffer = self._buffer
        data = await buffer.read()
        if not data:
            if buffer.error is None:
                raise ClientGoneError
            await error_response(describe(buffer.error))(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        send = scope["state"].get(DIRECT_SEND, send)
        sink = direct_sink(send)
        while not buffer.closed:
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            if sink is not None:
                buffer.attach(sink)
            data = await buffer.read()
        if buffer.error is not None:
            data += describe(buffer.error).events()
        await send({"type": "http.response.body", "body": data, "more_body": False})


def _watch_client(receive: Receive, on_gone: Callable[[], None]) -> Callable[[], None]:
    """Has `on_gone` called when the client has gone, until what this returns is called."""
    stop = call_when_gone(receive, on_gone)
    return _wait_for_departure(receive, on_gone) if stop is None else stop


def _wait_for_departure(receive: Receive, on_gone: Callable[[], None]) -> Callable[[], None]:
    """`_watch_client` with a task, for any `receive`."""
    is_over = False

    def leave(watcher: "asyncio.Future[None]") -> None:
        if not is_over and not watcher.cancelled():
            on_gone()

    def stop() -> None:
        nonlocal is_over
        is_over = True
        watcher.cancel()

    watcher = asyncio.ensure_future(_disconnect(receive))
    watcher.add_done_callback(leave)
    return stop


async def _disconnect(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
