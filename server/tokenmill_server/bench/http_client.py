"""A lean HTTP/1.1 client for load generation: keep-alive connections, server-sent events, no copies it can avoid.

It shares the machine with the server under test, so its cost per streamed token matters more than generality:
one `asyncio.Protocol` per connection, httptools for framing, one typed msgspec decode per event.
"""

import asyncio
import ssl
import time
from collections.abc import Mapping
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import httptools
import msgspec

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


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct, gc=False):
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class StreamSink:
    """Parses an OpenAI event stream and notes in `record` when output arrived.

    A chunk counts as output when it carries text, or when it is a plain completion chunk that does not end the
    request (a token may have no text of its own). Role-only, usage-only and finish-only chunks do not count, unless
    the usage says that there were tokens and none of them had text: they came with the end.
    """

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self.done = False
        self.finished = False
        self._usage_tokens = 0
        self._tail = b""
        self._text: list[str] = []

    def on_body(self, data: bytes, now_s: float) -> None:
        if self._tail:
            data = self._tail + data
        lines = data.split(b"\n")
        self._tail = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._on_data(line[5:], now_s)

    def _on_data(self, payload: bytes, now_s: float) -> None:
        if self.done or payload.strip() == b"[DONE]":
            self.done = True
            return
        chunk = _decode_chunk(payload)
        if chunk.error is not None:
            self.record.error = str(chunk.error)
        if chunk.choices:
            choice = chunk.choices[0]
            self.record.end_s = now_s
            self.finished = self.finished or choice.finish_reason is not None
            if self._is_output(choice):
                self.record.token_times_s.append(now_s)
        if chunk.usage is not None:
            self._usage_tokens = chunk.usage.completion_tokens

    def _is_output(self, choice: _Choice) -> bool:
        delta = choice.delta
        if delta is None:
            if choice.text:
                self._text.append(choice.text)
                return True
            return choice.finish_reason is None
        text = delta.content or delta.reasoning or delta.reasoning_content
        if text:
            self._text.append(text)
        return bool(text) or delta.tool_calls is not None

    def close(self) -> None:
        """The response is over: settle text, token count and whether it was a success."""
        record = self.record
        record.text = "".join(self._text)
        record.output_tokens = self._usage_tokens
        if self._usage_tokens and not record.token_times_s:
            record.token_times_s.append(record.end_s)
        if record.error is None and not record.token_times_s:
            record.error = "the response held no generated token"
        elif record.error is None and not (self.done or self.finished):
            record.error = "the stream ended before a finish reason or [DONE]"


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

    async def get(self, path: str) -> tuple[int, bytes]:
        """(status, body)."""
        sink = CollectSink()
        status, error = await self._send("GET", path, b"", sink)
        return status, error or bytes(sink.body)

    async def stream(self, path: str, body: bytes, record: RequestRecord) -> None:
        """POST `body` and fill `record` from the event stream. Every failure ends up in `record.error`."""
        sink = StreamSink(record)
        record.start_s = time.perf_counter()
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                status, error = await self._send("POST", path, body, sink)
            if status // 100 != 2:
                record.error = f"HTTP {status}: {error.decode(errors='replace')[:2000]}"
        except (OSError, ConnectionLostError, TimeoutError, msgspec.MsgspecError) as failure:
            record.error = f"{type(failure).__name__}: {failure}"
        record.end_s = record.end_s or time.perf_counter()
        sink.close()

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

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
