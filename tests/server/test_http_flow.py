"""Whoever answers a request hears that its client has gone, whatever the request before it still does."""

import asyncio
import socket
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from tokenmill_server.accept import ConnectionCounts
from tokenmill_server.http_server import HttpServer, call_when_gone

PATIENCE_S = 60.0


class Application:
    """Sends its first answer through a layer that has something to do after the last piece, and only then stops
    watching; answers nothing more."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.second_watches = asyncio.Event()
        self.first_ended = asyncio.Event()
        self.gone: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        await receive()
        has_gone = asyncio.Event()

        def on_gone() -> None:
            self.gone.append(path)
            has_gone.set()

        stop = call_when_gone(receive, on_gone)
        assert stop is not None
        if path == "/second":
            self.second_watches.set()
            await has_gone.wait()
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
        await send({"type": "http.response.body", "body": b"x"})
        await self.may_end.wait()
        stop()
        self.first_ended.set()


@pytest.mark.asyncio
async def test_who_stops_watching_late_ends_nobody_elses_watch(tmp_path: Path) -> None:
    app = Application()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = HttpServer(app, listener, ConnectionCounts(tmp_path / "counts", 1, 0))
        server.open()
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(b"GET /first HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"\r\n\r\nx")
            writer.write(b"POST /second HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
            await app.second_watches.wait()
            app.may_end.set()
            await app.first_ended.wait()
            writer.transport.abort()
            assert await server.wait_idle(5.0)
        await server.close()
    assert app.gone == ["/second"]
