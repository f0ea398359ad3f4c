"""Requests sent without waiting for answers: what they may cost, and what becomes of them when the connection ends."""

import asyncio
import functools
import gc
import socket
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, ParamSpec
from weakref import WeakSet

import pytest
import uvloop
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tokenmill_server import http_connection
from tokenmill_server.accept import ConnectionCounts
from tokenmill_server.http_server import HttpServer

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
SHORTEST_GET = b"GET / HTTP/1.1\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
KERNEL_BYTES = 64 * 1024
"""Of each of a connection's buffers in the kernel, which may double it."""
MAX_WAITING = 64
"""Requests of one connection."""
MAX_BYTES = 512 * 1024
"""That one connection may make the server hold: what the event loop reads at once, and what was held before."""
PATIENCE_S = 60.0

Parameters = ParamSpec("Parameters")


def on_uvloop(test: Callable[Parameters, Awaitable[None]]) -> Callable[Parameters, None]:
    """Runs a test on the event loop of servers."""

    @functools.wraps(test)
    def run(*arguments: Parameters.args, **named: Parameters.kwargs) -> None:
        async def limited() -> None:
            async with asyncio.timeout(3 * PATIENCE_S):
                await test(*arguments, **named)

        uvloop.run(limited())

    return run


class Application:
    """Reads bodies and answers `answer`, behind a gate. Says who was seen to leave."""

    def __init__(self, answer: bytes = b"ok") -> None:
        self.answer = answer
        self.gate = asyncio.Event()
        self.num_begun = 0
        self.num_left = 0

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        self.num_begun += 1
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.num_left += 1
                return
            body, more = body + message["body"], message["more_body"]
        watcher = asyncio.ensure_future(receive())
        opened = asyncio.ensure_future(self.gate.wait())
        await asyncio.wait((watcher, opened), return_when=asyncio.FIRST_COMPLETED)
        opened.cancel()
        if watcher.done():
            self.num_left += 1
            return
        watcher.cancel()
        answer = self.answer + body
        length = (b"content-length", str(len(answer)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": answer})


@asynccontextmanager
async def serve(folder: Path, app: Application) -> AsyncIterator[tuple[str, int]]:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = HttpServer(app, listener, ConnectionCounts(folder / "counts", 1, 0))
        server.open()
        yield listener.getsockname()
        await server.close()


async def connect(address: tuple[str, int]) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, address)
    return connection


async def send_until_stuck(connection: socket.socket, data: bytes) -> int:
    """How much of `data` was taken before nothing was for a while."""
    view, num_sent, num_idle = memoryview(data), 0, 0
    while num_idle < 20 and num_sent < len(data):
        try:
            num_sent += connection.send(view[num_sent:])
            num_idle = 0
        except BlockingIOError:
            num_idle += 1
        await asyncio.sleep(0.01)
    return num_sent


async def send_forever(connection: socket.socket) -> None:
    while True:
        await asyncio.get_running_loop().sock_sendall(connection, bytes(1024))
        await asyncio.sleep(0.01)


async def read_all(connection: socket.socket) -> bytes:
    data = bytearray()
    while part := await asyncio.get_running_loop().sock_recv(connection, 1 << 20):
        data += part
    return bytes(data)


async def exchange(address: tuple[str, int], sent: bytes, ends: bool = False) -> bytes:
    """Everything that comes back until the server closes the connection; `ends`: nothing more is sent."""
    with await connect(address) as connection:
        await asyncio.get_running_loop().sock_sendall(connection, sent)
        if ends:
            connection.shutdown(socket.SHUT_WR)
        return await asyncio.wait_for(read_all(connection), PATIENCE_S)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


class Requests:
    """Those of one test's server that are in memory and not answered."""

    def __init__(self) -> None:
        self._all: WeakSet[RequestResponseCycle] = WeakSet()

    def add(self, *arguments: Any, **named: Any) -> RequestResponseCycle:
        request = RequestResponseCycle(*arguments, **named)
        self._all.add(request)
        return request

    def count(self) -> int:
        return sum(not request.response_complete for request in self._all)


def collect_and_count(requests: Requests) -> int:
    gc.collect()
    return requests.count()


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    requests = Requests()
    monkeypatch.setattr(httptools_impl, "RequestResponseCycle", requests.add)
    return requests


@pytest.mark.parametrize("request_", [GET, SHORTEST_GET, POST], ids=["get", "shortest", "post"])
@pytest.mark.parametrize("num_connections", [1, 8])
@on_uvloop
async def test_requests_that_wait_cost_little(
    tmp_path: Path, requests: Requests, request_: bytes, num_connections: int
) -> None:
    """Neither many of them are held, nor many of their bytes, while the first one is answered."""
    app = Application()
    flood = request_ * (4 * 1024 * 1024 // len(request_))
    async with serve(tmp_path, app) as address, AsyncExitStack() as stack:
        connections = [stack.enter_context(await connect(address)) for _ in range(num_connections)]
        tracemalloc.start()
        try:
            sent = await asyncio.gather(*(send_until_stuck(connection, flood) for connection in connections))
            num_held_bytes = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert max(sent) < 4 * KERNEL_BYTES + MAX_BYTES
        assert requests.count() <= num_connections * (MAX_WAITING + 1)
        assert num_held_bytes < num_connections * 2 * MAX_BYTES
        assert app.num_begun == num_connections


@on_uvloop
async def test_requests_that_wait_cost_little_while_others_are_answered(tmp_path: Path, requests: Requests) -> None:
    """Each answer admits no more requests than it makes room for."""
    app = Application()
    app.gate.set()
    most = 0
    flood = SHORTEST_GET * 50_000
    async with serve(tmp_path, app) as address:
        with await connect(address) as connection:
            sending = asyncio.ensure_future(asyncio.get_running_loop().sock_sendall(connection, flood))
            while app.num_begun < 10 * MAX_WAITING:
                most = max(most, requests.count())
                for _ in range(10):
                    await asyncio.get_running_loop().sock_recv(connection, 4096)
            sending.cancel()
    assert 1 < most <= MAX_WAITING + 1


@on_uvloop
async def test_answers_wait_for_a_client_that_reads(tmp_path: Path) -> None:
    """They do not pile up in the server, and none is lost."""
    app = Application(bytes(16 * 1024))
    app.gate.set()
    num_sent = 2000
    async with serve(tmp_path, app) as address:
        with await connect(address) as connection:
            sending = asyncio.ensure_future(asyncio.get_running_loop().sock_sendall(connection, GET * num_sent))
            begun = -1
            while begun != app.num_begun:
                begun = app.num_begun
                await asyncio.sleep(0.2)
            assert begun * len(app.answer) < 4 * KERNEL_BYTES + MAX_BYTES
            heads = b""
            while heads.count(b"HTTP/1.1 200 OK") < num_sent:
                heads += (await asyncio.get_running_loop().sock_recv(connection, 1 << 20)).replace(b"\0", b"")
            await sending
    assert app.num_begun == num_sent


@pytest.mark.parametrize("size", [1, 700, 5000, 10**7])
@on_uvloop
async def test_every_request_is_answered_in_order(tmp_path: Path, size: int) -> None:
    """With bodies of all sizes, in pieces of any size, while the first answer takes its time."""
    app = Application(b"")
    bodies = [f"<{number}>".encode() * (number**3 if size > 1 else 1) for number in range(40)]
    heads = (b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) for body in bodies)
    sent = b"".join(head + body for head, body in zip(heads, bodies, strict=True))
    sent += CHUNKED.replace(b"Host: x", b"Connection: close") + b"3\r\nend\r\n0\r\n\r\n"

    async def send(connection: socket.socket) -> None:
        for position in range(0, len(sent), size):
            await asyncio.get_running_loop().sock_sendall(connection, sent[position : position + size])

    async with serve(tmp_path, app) as address:
        with await connect(address) as connection:
            sending = asyncio.ensure_future(send(connection))
            await until(lambda: app.num_begun == 1)
            app.gate.set()
            answers = await read_all(connection)
            await sending
    for body in (*bodies, b"end"):
        head, _, answers = answers.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert answers.startswith(body)
        answers = answers[len(body) :]
    assert answers == b""


@pytest.mark.parametrize("following", [b"", GET, POST * 3, CHUNKED, GET * 2000, b"GARBAGE\r\n\r\n"])
@pytest.mark.parametrize("resets", [False, True])
@on_uvloop
async def test_a_client_that_leaves_is_noticed_behind_waiting_requests(
    tmp_path: Path, requests: Requests, following: bytes, resets: bool
) -> None:
    app = Application()
    async with serve(tmp_path, app) as address:
        with await connect(address) as connection:
            await asyncio.get_running_loop().sock_sendall(connection, POST + following)
            await until(lambda: app.num_begun == 1)
            if resets:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        await until(lambda: app.num_left == 1)
        await until(lambda: not collect_and_count(requests))
        await asyncio.sleep(0.05)
        assert app.num_begun == 1


@pytest.mark.parametrize("bad", [b"GARBAGE\r\n\r\n", CHUNKED + b"ZZZ\r\n", b"GET / HTTP/1.1\r\nX: " + b"a" * 300_000])
@pytest.mark.parametrize("good", [b"", POST, POST * 3, GET * 500])
@on_uvloop
async def test_good_requests_are_answered_before_a_bad_one(tmp_path: Path, good: bytes, bad: bytes) -> None:
    app = Application()
    app.gate.set()
    async with serve(tmp_path, app) as address:
        answers = await exchange(address, good + bad)
    *earlier, last = answers.split(b"HTTP/1.1 ")[1:]
    assert len(earlier) == good.count(b"HTTP/1.1")
    assert all(answer.startswith(b"200 ") and b"\r\n\r\nok" in answer for answer in earlier)
    status, code = (b"431", b"headers_too_large") if len(bad) > 1000 else (b"400", b"invalid_http")
    assert last.startswith(status)
    assert b'"code":"%b"' % code in last.partition(b"\r\n\r\n")[2]


@on_uvloop
async def test_who_sends_more_than_is_read_gets_the_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not keep the connection by sending on."""
    async with serve(tmp_path, Application()) as address:
        with monkeypatch.context() as patch:
            patch.setattr(http_connection, "_LINGER_S", PATIENCE_S)
            answer = await exchange(address, bytes(4 * 1024 * 1024))
        assert answer.startswith(b"HTTP/1.1 400 ")
        with await connect(address) as connection, pytest.raises(ConnectionError):
            await asyncio.wait_for(send_forever(connection), PATIENCE_S)


@on_uvloop
async def test_a_bad_chunk_ends_the_request_that_it_belongs_to(tmp_path: Path) -> None:
    app = Application()
    async with serve(tmp_path, app) as address:
        with await connect(address) as connection:
            await asyncio.get_running_loop().sock_sendall(connection, CHUNKED + b"3\r\nabc\r\n")
            await until(lambda: app.num_begun == 1)
            await asyncio.get_running_loop().sock_sendall(connection, b"ZZZ\r\n")
            answer = await read_all(connection)
        await until(lambda: app.num_left == 1)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("num_sent", [1, 3, 3000])
@on_uvloop
async def test_reading_requests_are_answered_after_the_client_has_sent_its_last(tmp_path: Path, num_sent: int) -> None:
    app = Application()
    app.gate.set()
    async with serve(tmp_path, app) as address:
        answers = await exchange(address, GET * num_sent + b"GET / HT", ends=True)
        assert answers.count(b"HTTP/1.1 200 OK") == answers.count(b"\r\n\r\nok") == num_sent
        assert (await exchange(address, b"GARBAGE\r\n\r\n", ends=True)).startswith(b"HTTP/1.1 400 ")
        assert await exchange(address, b"", ends=True) == b""


@pytest.mark.parametrize("sent", [POST, CHUNKED, GET + POST, b"GET / HTTP/1.1\r\nContent-Length: 5\r\n\r\nabc"])
@on_uvloop
async def test_other_requests_end_with_what_the_client_sends(tmp_path: Path, sent: bytes) -> None:
    """It may have left, and nobody computes for it."""
    app = Application()
    async with serve(tmp_path, app) as address:
        with await connect(address) as connection:
            await asyncio.get_running_loop().sock_sendall(connection, sent)
            await until(lambda: app.num_begun == 1)
            connection.shutdown(socket.SHUT_WR)
            reading = asyncio.ensure_future(read_all(connection))
            if sent.startswith(GET):
                app.gate.set()
                assert (await reading).count(b"HTTP/1.1 200 OK") == 1
            else:
                assert await reading == b""
                await until(lambda: app.num_left == 1)
        assert app.num_begun == 1
