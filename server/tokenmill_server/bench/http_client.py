"""A lean HTTP/1.1 client for load generation: keep-alive connections, server-sent events, no copies it can avoid.

It shares the machine with the server under test, so its cost per streamed token matters more than generality:
one `asyncio.Protocol` per connection, httptools for framing, and nothing is parsed while streams run.
"""

import asyncio
import ssl
import time
from collections.abc import Mapping
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from tokenmill_server.bench.event_stream import StreamSink
from tokenmill_server.bench.metrics import RequestRecord

REQUEST_TIMEOUT_S = 6 * 60 * 60.0


class ConnectionLostError(Exception):
    """The peer closed the connection before the response was complete."""


class BodySink(Protocol):
    """Receives the body of one response."""

    def on_body(self, data: bytes, now_s: float) -> None:
        """`data` arrived at `now_s` (`time.perf_counter`)."""


class CollectSink:
    """Keeps the whole body."""

    def __init__(self) -> None:
        self.body = bytearray()

    def on_body(self, data: bytes, now_s: float) -> None:
        self.body += data


class Connection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self) -> None:
        self.reusable = True
        self.received_any = False
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._sink: BodySink = CollectSink()
        self._errors = CollectSink()
        self._reply: asyncio.Future[int] | None = None
        self._now_s = 0.0
        self._ends_with_connection = False

    async def exchange(self, request: bytes, sink: BodySink) -> tuple[int, bytes]:
        """Send `request`, feed a 2xx body to `sink`; return (status, body of any other status).

        Raises: ConnectionLostError.
        """
        if self._transport is None or not self.reusable:
            raise ConnectionLostError("the connection is closed")
        self._reply = asyncio.get_running_loop().create_future()
        self._sink = sink
        self._errors = CollectSink()
        self.received_any = False
        self._ends_with_connection = False
        self._transport.write(request)
        return await self._reply, bytes(self._errors.body)

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        self.received_any = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionLostError(f"malformed response: {error.__context__ or error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if exc is None and self._ends_with_connection:
            self.on_message_complete()
        self._fail(ConnectionLostError(f"the server closed the connection: {exc or 'end of file'}"))

    def on_message_begin(self) -> None:
        self._ends_with_connection = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in {b"content-length", b"transfer-encoding"}:
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() // 100 != 2:
            self._sink = self._errors

    def on_body(self, body: bytes) -> None:
        self._sink.on_body(body, self._now_s)

    def on_message_complete(self) -> None:
        self.reusable = self.reusable and self._parser.should_keep_alive()
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(self._parser.get_status_code())

    def _fail(self, error: Exception) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error)
        self.close()


class HttpClient:
    """Keep-alive pool for one server."""

    def __init__(self, base_url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"base URL {base_url!r} is not http://HOST[:PORT] or https://HOST[:PORT]")
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname
        self._port = parts.port or (443 if self._ssl else 80)
        self._prefix = parts.path.rstrip("/")
        lines = [f"Host: {parts.netloc.rpartition('@')[2]}", *(f"{name}: {value}" for name, value in headers.items())]
        self._head = "\r\n".join(lines)
        self._idle: list[Connection] = []

    async def open(self, count: int) -> None:
        """Connects `count` times, so that no request has to wait for that. Failures are left to the requests."""
        opened = await asyncio.gather(*(self._connect() for _ in range(count)), return_exceptions=True)
        self._idle.extend(connection for connection in opened if isinstance(connection, Connection))

    async def get(self, path: str) -> tuple[int, bytes]:
        """(status, body)."""
        return await self._exchange_whole("GET", path, b"")

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """(status, body) of the answer, whatever it is made of."""
        return await self._exchange_whole("POST", path, body)

    async def stream(self, path: str, body: bytes, record: RequestRecord) -> StreamSink:
        """POST `body` and keep the event stream: `close` of the result fills `record`. Every failure ends up in
        `record.error`."""
        sink = StreamSink(record)
        record.start_s = time.perf_counter()
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                status, error = await self._send("POST", path, body, sink)
            if status // 100 != 2:
                record.error = f"HTTP {status}: {error.decode(errors='replace')[:2000]}"
        except (OSError, ConnectionLostError, TimeoutError) as failure:
            record.error = f"{type(failure).__name__}: {failure}"
        record.end_s = time.perf_counter()
        return sink

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _exchange_whole(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        sink = CollectSink()
        status, error = await self._send(method, path, body, sink)
        return status, error or bytes(sink.body)

    async def _send(self, method: str, path: str, body: bytes, sink: BodySink) -> tuple[int, bytes]:
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}\r\n"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        request = head.encode("latin-1") + b"\r\n" + body
        while self._idle:
            connection = self._idle.pop()
            if not connection.reusable:
                continue
            try:
                return await self._exchange(connection, request, sink)
            except ConnectionLostError:
                # A server may close an idle connection just as it is used again; nothing was answered, so resend.
                if connection.received_any:
                    raise
        connection = await self._connect()
        return await self._exchange(connection, request, sink)

    async def _exchange(self, connection: Connection, request: bytes, sink: BodySink) -> tuple[int, bytes]:
        try:
            reply = await connection.exchange(request, sink)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return reply

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._ssl)
        return connection
