"""Limits on the time that clients may take, with a short one."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from starlette.types import Receive, Scope, Send

from tokenmill_server import http_connection
from tokenmill_server.accept import ConnectionCounts
from tokenmill_server.http_server import HttpServer

pytestmark = pytest.mark.asyncio

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
HEAD_TIMEOUT_S = 0.3
BODY_TIMEOUT_S = 0.5
PATIENCE_S = 60.0
POST = b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\n"


async def slow_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Takes three times as long as a head may. On a path of its own it sends the body back."""
    if scope["path"] == "/read":
        await read_app(receive, send)
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(3):
        await asyncio.sleep(HEAD_TIMEOUT_S)
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
    await send({"type": "http.response.body", "body": b"end"})


async def read_app(receive: Receive, send: Send) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"got " + body, "more_body": True})
    await send({"type": "http.response.body", "body": b"."})


@pytest_asyncio.fixture
async def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[str, int]]:
    monkeypatch.setattr(http_connection, "_BODY_TIMEOUT_S", BODY_TIMEOUT_S)
    monkeypatch.setattr(http_connection, "_HEAD_TIMEOUT_S", HEAD_TIMEOUT_S)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = HttpServer(slow_app, listener, ConnectionCounts(tmp_path / "counts", 1, 0))
        server.open()
        yield listener.getsockname()
        await server.close()


@pytest.fixture
def patience(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits are not what is tested."""
    monkeypatch.setattr(http_connection, "_BODY_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(http_connection, "_HEAD_TIMEOUT_S", PATIENCE_S)


@asynccontextmanager
async def connect(address: tuple[str, int]) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*address)
    try:
        yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("sent", [b"", b"GET", REQUEST[:-2], b"\r\n", b"GET / HTTP/1.1\r\nX: " + b"a" * 1000])
async def test_a_head_that_never_ends(address: tuple[str, int], sent: bytes) -> None:
    async with connect(address) as (reader, writer):
        writer.write(sent)
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""


@pytest.mark.parametrize("following", [b"", b"GET", b"\r\n"])
async def test_answers_are_never_cut(address: tuple[str, int], following: bytes) -> None:
    """However long they take, and whatever the client has sent after its request; that alone is not waited for."""
    async with connect(address) as (reader, writer):
        writer.write(REQUEST)
        await asyncio.sleep(HEAD_TIMEOUT_S / 2)
        writer.write(following)
        assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"3\r\nend\r\n0\r\n\r\n")
        if following == b"GET":
            assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""


async def test_connections_between_requests_stay_open(address: tuple[str, int]) -> None:
    async with connect(address) as (reader, writer):
        for _ in range(2):
            writer.write(REQUEST)
            await reader.readuntil(b"0\r\n\r\n")
            await asyncio.sleep(2 * HEAD_TIMEOUT_S)


@pytest.mark.parametrize("sent", [b"", b"abc"])
async def test_a_body_that_never_ends(address: tuple[str, int], sent: bytes) -> None:
    async with connect(address) as (reader, writer):
        writer.write(POST + sent)
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"request_timeout"' in answer.partition(b"\r\n\r\n")[2]


async def test_a_slow_body(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer than the limit, each of its bytes much less."""
    monkeypatch.setattr(http_connection, "_BODY_TIMEOUT_S", 2.0)
    async with connect(address) as (reader, writer):
        writer.write(POST)
        for byte in b"abcdef":
            await asyncio.sleep(0.4)
            writer.write(bytes([byte]))
        assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"a\r\ngot abcdef\r\n1\r\n.\r\n0\r\n\r\n")


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("wish", [b"h2c", b"websocket"])
@pytest.mark.parametrize("cut", [1, 30, -3, None])
async def test_upgrades_are_ignored(address: tuple[str, int], wish: bytes, cut: int | None) -> None:
    """The body arrives, in whatever pieces, and so does the next request."""
    wishes = b"\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: " + wish + b"\r\nHTTP2-Settings: AAM\r\n\r\n"
    async with connect(address) as (reader, writer):
        request = POST.replace(b"\r\n\r\n", wishes) + b"abcdef" + POST + b"ghijkl"
        writer.write(request[:cut])
        await asyncio.sleep(0.05)
        writer.write(request[cut:] if cut is not None else b"")
        for body in (b"abcdef", b"ghijkl"):
            answer = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), PATIENCE_S)
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b"got " + body in answer


@pytest.mark.usefixtures("patience")
async def test_http_1_0_knows_no_chunks(address: tuple[str, int]) -> None:
    async with connect(address) as (reader, writer):
        writer.write(POST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"abcdef")
        head, _, body = (await asyncio.wait_for(reader.read(), PATIENCE_S)).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        assert body == b"got abcdef."
