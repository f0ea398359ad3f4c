"""Limits on the time that clients may take, with a short one."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from starlette.types import Receive, Scope, Send

from tokenmill_server import http_server
from tokenmill_server.accept import ConnectionCounts
from tokenmill_server.http_server import HttpServer

pytestmark = pytest.mark.asyncio

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
HEAD_TIMEOUT_S = 0.3


async def slow_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Takes three times as long as a head may."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(3):
        await asyncio.sleep(HEAD_TIMEOUT_S)
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
    await send({"type": "http.response.body", "body": b"end"})


@pytest_asyncio.fixture
async def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[str, int]]:
    monkeypatch.setattr(http_server, "_HEAD_TIMEOUT_S", HEAD_TIMEOUT_S)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = HttpServer(slow_app, listener, ConnectionCounts(tmp_path / "counts", 1, 0))
        server.open()
        yield listener.getsockname()
        await server.close()


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
        assert await asyncio.wait_for(reader.read(), 10 * HEAD_TIMEOUT_S) == b""


@pytest.mark.parametrize("following", [b"", b"GET", b"\r\n"])
async def test_answers_are_never_cut(address: tuple[str, int], following: bytes) -> None:
    """However long they take, and whatever the client has sent after its request; that alone is not waited for."""
    async with connect(address) as (reader, writer):
        writer.write(REQUEST)
        await asyncio.sleep(HEAD_TIMEOUT_S / 2)
        writer.write(following)
        assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"3\r\nend\r\n0\r\n\r\n")
        if following == b"GET":
            assert await asyncio.wait_for(reader.read(), 10 * HEAD_TIMEOUT_S) == b""


async def test_connections_between_requests_stay_open(address: tuple[str, int]) -> None:
    async with connect(address) as (reader, writer):
        for _ in range(2):
            writer.write(REQUEST)
            await reader.readuntil(b"0\r\n\r\n")
            await asyncio.sleep(2 * HEAD_TIMEOUT_S)
