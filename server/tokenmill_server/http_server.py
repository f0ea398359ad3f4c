"""uvicorn's HTTP/1.1 protocol on our own accept loop: the launcher binds, several processes accept."""

import asyncio
import socket
from collections.abc import Callable
from email.utils import formatdate

import httptools
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from tokenmill_server.accept import Acceptor, ConnectionCounts
from tokenmill_server.errors import ErrorReply
from tokenmill_server.write_batch import BatchedTransport, WriteBatch

_KEEP_ALIVE_S = 75
"""Idle connections stay open longer than the pools of common clients and proxies (60 s) keep them."""
MAX_HEADERS = 256
MAX_HEAD_BYTES = 256 * 1024
"""Of a request's first line and headers together."""
_HEAD_TIMEOUT_S = 60.0
"""How long a client may take to send a request's head, from its connection or the head's first byte on."""
_BODY_TIMEOUT_S = 60.0
"""How long a client may send nothing of a body that is not complete."""
_DATE_PERIOD_S = 1.0
_POLL_S = 0.02


class HttpServer:
    """Serves one application to the connections of one shared listener."""

    def __init__(self, app: ASGIApp, listener: socket.socket, counts: ConnectionCounts) -> None:
        self._config = uvicorn.Config(
            app,
            http=HttpToolsProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        self._config.load()
        self._state = ServerState()
        self._counts = counts
        self._loop = asyncio.get_running_loop()
        self._writes = WriteBatch()
        self._acceptor = Acceptor(listener, counts, self._new_protocol)
        self._set_date()

    def open(self) -> None:
        """Starts accepting."""
        self._acceptor.open()

    def flush(self) -> None:
        """Sends what has been written to all connections in this turn of the event loop, which else its end does."""
        self._writes.flush()

    @property
    def num_open(self) -> int:
        """Requests that are being answered."""
        return len(self._state.tasks)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no request is being answered; False if that took too long."""
        deadline = self._loop.time() + timeout_s
        while self.num_open:
            if self._loop.time() >= deadline:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def close(self) -> None:
        """Stops accepting and closes idle connections."""
        self._acceptor.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        await asyncio.sleep(_POLL_S)

    def _new_protocol(self) -> asyncio.Protocol:
        return _CountedProtocol(self._config, self._state, self._counts, self._writes)

    def _set_date(self) -> None:
        self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        self._loop.call_later(_DATE_PERIOD_S, self._set_date)


def direct_sink(send: Send) -> Callable[[bytes], bool] | None:
    """A function that puts a body chunk straight on the connection to which `send` belongs, without a coroutine and
    a task switch for every token; chunks of one turn of the event loop leave in one write. It refuses while the client
    reads too slowly; `send` waits for it then.

    None if `send` is not this server's own, or the response has not begun or is not chunked.
    """
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle) or not cycle.chunked_encoding:
        return None
    flow, transport = cycle.flow, cycle.transport
    write = transport.hold if isinstance(transport, BatchedTransport) else transport.write

    def sink(data: bytes) -> bool:
        if flow.write_paused:
            return False
        if not cycle.disconnected:
            write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    return sink


class _TooLargeHeadError(Exception):
    """Stops the parser."""


class _CountedProtocol(HttpToolsProtocol):
    """Tells when its connection is over. Takes request heads of a limited size, in a limited time, and no bodies that
    stop in the middle. Wishes for another protocol are ignored: the answer is HTTP/1.1."""

    def __init__(
        self, config: uvicorn.Config, state: ServerState, counts: ConnectionCounts, writes: WriteBatch
    ) -> None:
        super().__init__(config=config, server_state=state, app_state={})
        self._counts = counts
        self._writes = writes
        self._in_head = False
        self._num_headers = 0
        self._head_bytes = 0
        """Of complete headers."""
        self._open_head_bytes = 0
        """Received for a head that is not complete yet: the parser collects one header in memory whatever its size."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._in_body = False
        self._body_time = 0.0
        """When the last byte of an incomplete body came, in seconds of the event loop's clock."""
        self._body_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(BatchedTransport(transport, self._writes))
        self._head_timer = self.loop.call_later(_HEAD_TIMEOUT_S, self._on_head_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_body_timer()
        self._counts.closed()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if self.transport.is_closing():
            return
        self._body_time = self.loop.time()
        if self._in_body and self._body_timer is None:
            self._body_timer = self.loop.call_later(_BODY_TIMEOUT_S, self._on_body_timeout)
        if self._in_head:
            self._open_head_bytes += len(data)
            if self._open_head_bytes > MAX_HEAD_BYTES:
                self._refuse(_TOO_LARGE_HEAD)
                return
        if self._head_timer is None and (self._in_head or self._is_idle):
            self._head_timer = self.loop.call_later(_HEAD_TIMEOUT_S, self._on_head_timeout)

    def send_400_response(self, msg: str) -> None:
        too_large = self._num_headers > MAX_HEADERS or self._head_bytes > MAX_HEAD_BYTES
        self._refuse(
            _TOO_LARGE_HEAD if too_large else ErrorReply(400, "invalid_request_error", msg, code="invalid_http")
        )

    # --- the parser's callbacks -----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._num_headers = self._head_bytes = self._open_head_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._num_headers += 1
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_head_timer()
        if self._wants_upgrade:
            return  # `_parse` starts again without that wish
        self._in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self._wants_upgrade:
            return
        self._in_body = False
        self._stop_body_timer()
        super().on_message_complete()

    # --- requests that are not plain HTTP/1.1 ---------------------------------------------------------------------

    @property
    def _wants_upgrade(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _parse(self, data: bytes) -> None:
        """Feeds the parser. It takes what follows a request with `Upgrade` for another protocol, so that request is
        parsed again without the header: its body and whatever comes then are HTTP as before."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._wants_upgrade:
                    return
                data = data[upgrade.args[0] :]
            line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
            lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as for the first parser
            data = b"".join((line, *lines, b"\r\n", data))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        if cycle.scope["http_version"] != "1.1":
            app = _without_chunks(app, cycle)
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    # --- limits ---------------------------------------------------------------------------------------------------

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._num_headers > MAX_HEADERS or self._head_bytes > MAX_HEAD_BYTES:
            raise _TooLargeHeadError

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        if self._is_idle:
            self.transport.close()
        else:  # an earlier request is still being answered
            self._head_timer = self.loop.call_later(_HEAD_TIMEOUT_S, self._on_head_timeout)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_body_timeout(self) -> None:
        self._body_timer = None
        silent_s = self.loop.time() - self._body_time
        if self._is_idle:
            self.transport.close()
        elif silent_s < _BODY_TIMEOUT_S or self.pipeline or self.flow.read_paused or self.cycle.response_started:
            # not long enough, or it is not the client that we wait for
            wait_s = max(_BODY_TIMEOUT_S - silent_s, _BODY_TIMEOUT_S / 10)
            self._body_timer = self.loop.call_later(wait_s, self._on_body_timeout)
        else:
            self.cycle.disconnected = True  # for the application nobody is there any more
            self._refuse(_BODY_STOPPED, unanswered=True)

    def _stop_body_timer(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _refuse(self, reply: ErrorReply, unanswered: bool = False) -> None:
        """Answers what is no request, unless it came in the middle of another answer (`unanswered`: it did not);
        closes the connection."""
        if self._is_idle or unanswered:
            body = reply.json()
            self.transport.write(
                STATUS_LINE[reply.status]
                + b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
                + body
            )
        self.transport.close()


def _without_chunks(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """`app` for a client of HTTP/1.0, which knows no chunks: an answer of unknown length ends with the connection."""

    async def unframed(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = False

        async def send_unframed(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_unframed)

    return unframed


_BODY_STOPPED = ErrorReply(
    408,
    "invalid_request_error",
    f"the request's body is incomplete and nothing of it has come for {_BODY_TIMEOUT_S:g} s",
    code="request_timeout",
)
_TOO_LARGE_HEAD = ErrorReply(
    431,
    "invalid_request_error",
    f"the request's head is too large: at most {MAX_HEADERS} headers and {MAX_HEAD_BYTES} bytes are allowed",
    code="headers_too_large",
)
