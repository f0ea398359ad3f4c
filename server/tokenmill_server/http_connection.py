"""uvicorn's HTTP/1.1 protocol with limits on what one client may send, make wait and leave unfinished."""

import asyncio
import os
from dataclasses import dataclass

import httptools
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from tokenmill_server.accept import ConnectionCounts
from tokenmill_server.errors import ErrorReply
from tokenmill_server.http_flow import Flow
from tokenmill_server.write_batch import BatchedTransport, WriteBatch

_HEAD_TIMEOUT_S = 60.0
"""How long a client may take to send a request's head, from its connection or the head's first byte on."""
_BODY_TIMEOUT_S = 60.0
"""How long a client may send nothing of a body that is not complete."""
_LINGER_S = 2.0
"""How long a client that was refused may go on sending: it is read and ignored."""
_PIECE_BYTES = 1024
"""Parsed at once, unless it is all one body. So many bytes are at most 64 requests, which then wait for their turn."""
_MAX_UNPARSED_BYTES = 64 * 1024
"""With more than that behind requests that wait for their turn, a connection is not read. With less it is, since only
a connection that is read tells that its client has gone."""
_SAFE_METHODS = frozenset({"GET", "HEAD"})


@dataclass(slots=True, frozen=True)
class HeadLimits:
    """Of a request: headers, and bytes of its first line and headers together."""

    max_headers: int = 256
    max_bytes: int = 256 * 1024


DEFAULT_LIMITS = HeadLimits()


class _TooLargeHeadError(Exception):
    """Stops the parser."""


class HttpConnection(HttpToolsProtocol):
    """Tells when its connection is over. Takes request heads of a limited size, in a limited time, and no bodies that
    stop in the middle. Wishes for another protocol are ignored: the answer is HTTP/1.1.

    Nothing is parsed while requests wait for the answer to an earlier one, and answers wait for a client that reads:
    a connection costs a limited amount of memory, whatever its client sends and does not read.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        state: ServerState,
        counts: ConnectionCounts,
        writes: WriteBatch,
        limits: HeadLimits,
    ) -> None:
        super().__init__(config=config, server_state=state, app_state={})
        self._limits = limits
        self._max_headers, self._max_head_bytes = limits.max_headers, limits.max_bytes
        self._counts = counts
        self._writes = writes
        self._unparsed = bytearray()
        self._answering: RequestResponseCycle | None = None
        """The newest request that has begun to be answered; `cycle` is the newest that has been parsed."""
        self._refusal: ErrorReply | None = None
        """What follows the answers to the requests before it. Nothing is parsed any more."""
        self._is_at_end = False
        """The client sends no more."""
        self._in_head = False
        self._num_headers = 0
        self._head_bytes = 0
        """Of complete headers."""
        self._open_head_bytes = 0
        """Received for a head that is not complete yet: the parser collects one header in memory whatever its size."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._in_body = False
        self._body_bytes_left = 0
        """0 as well if the head does not tell the body's length."""
        self._body_time = 0.0
        """When the last byte of an incomplete body came, in seconds of the event loop's clock."""
        self._body_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(BatchedTransport(transport, self._writes))
        self.flow = self._flow = Flow(self.transport)
        self._head_timer = self.loop.call_later(_HEAD_TIMEOUT_S, self._on_head_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        self._counts.closed()
        self._unparsed.clear()
        self.pipeline.clear()
        if self._answering is not None and not self._answering.response_complete:
            _leave(self._answering)
            self._flow.gone()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._refusal is not None or self.transport.is_closing():
            return
        self._body_time = self.loop.time()
        self._unparsed += data
        self._parse_received()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open for answers. That the client sends no more mostly means that it has gone,
        and it looks the same: only what costs next to nothing is answered to nobody."""
        self._is_at_end = True
        self._close_after_end()
        if self.scheme == "https":
            return False  # TLS has no half of a connection to keep
        answering = self._answering
        if answering is None or answering.response_complete or answering.disconnected or self.transport.is_closing():
            return False
        return answering.scope["method"] in _SAFE_METHODS

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._refusal is None:
            self._parse_received()
        elif self._is_idle:
            self._close_with(self._refusal)

    # --- the parser's callbacks -----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._num_headers = self._head_bytes = self._open_head_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._head_bytes += len(url)
        if self._head_bytes > self._max_head_bytes:
            raise _TooLargeHeadError

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._num_headers += 1
        self._head_bytes += len(name) + len(value)
        if self._num_headers > self._max_headers or self._head_bytes > self._max_head_bytes:
            raise _TooLargeHeadError

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_head_timer()
        if self._wants_upgrade:
            return  # `_feed` starts again without that wish
        super().on_headers_complete()
        self._flow.resume_reading()  # uvicorn pauses for a request that has to wait; `_parse_received` decides that
        self._in_body = True
        self._body_bytes_left = next((int(value) for name, value in self.headers if name == b"content-length"), 0)

    def on_body(self, body: bytes) -> None:
        self._body_bytes_left -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._wants_upgrade:
            return
        self._in_body = False
        self._body_bytes_left = 0
        self._stop_body_timer()
        super().on_message_complete()

    # --- parsing --------------------------------------------------------------------------------------------------

    def _parse_received(self) -> None:
        """Parses what has been received, until requests have to wait for their turn."""
        position = 0
        while position < len(self._unparsed) and not self.pipeline and self._refusal is None:
            piece = self._unparsed[position : position + max(_PIECE_BYTES, self._body_bytes_left)]
            position += len(piece)
            self._parse(piece)
        del self._unparsed[: position if self._refusal is None else None]
        if self.transport.is_closing():
            return
        self._flow.set_full(len(self._unparsed) > _MAX_UNPARSED_BYTES)
        self._close_after_end()
        if self._refusal is not None:
            return
        if self._in_body and self._body_timer is None:
            self._body_timer = self.loop.call_later(_BODY_TIMEOUT_S, self._on_body_timeout)
        if position and self._head_timer is None and (self._in_head or self._is_idle):
            self._head_timer = self.loop.call_later(_HEAD_TIMEOUT_S, self._on_head_timeout)

    def _parse(self, piece: bytearray) -> None:
        try:
            self._feed(piece)
        except httptools.HttpParserError:
            self._refuse(_too_large_head(self._limits) if self._has_too_much_head else _NO_HTTP)
            return
        if self._in_head:
            self._open_head_bytes += len(piece)
            if self._open_head_bytes > self._limits.max_bytes:
                self._refuse(_too_large_head(self._limits))

    def _feed(self, data: bytes | bytearray) -> None:
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

    @property
    def _wants_upgrade(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        if self._is_at_end and cycle.scope["method"] not in _SAFE_METHODS:
            self.transport.close()
            return
        self._answering = cycle
        self._unset_keepalive_if_required()
        if cycle.scope["http_version"] != "1.1":
            app = _without_chunks(app, cycle)
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    # --- the end of a connection ----------------------------------------------------------------------------------

    @property
    def _is_idle(self) -> bool:
        return self._answering is None or self._answering.response_complete

    def _refuse(self, reply: ErrorReply) -> None:
        """Answers `reply` to what is no request, once the requests before it are answered, and closes the connection.
        A request that turns out broken when its answer has begun gets no second one."""
        self._refusal = reply
        self._stop_timers()
        if self._in_body and self.pipeline:  # a broken request that still has to wait
            self.pipeline.popleft()
            self.cycle = self.pipeline[0][0] if self.pipeline else self._answering  # type: ignore[assignment]
        elif self._in_body and self.cycle.response_started:
            self.transport.close()
        elif self._in_body:
            _leave(self.cycle)
            self._close_with(reply)
        elif self._is_idle:
            self._close_with(reply)

    def _close_with(self, reply: ErrorReply) -> None:
        body = reply.json()
        self.transport.write(
            STATUS_LINE[reply.status]
            + b"content-type: application/json\r\nx-request-id: %b\r\n" % os.urandom(16).hex().encode()
            + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            + body
        )
        # To close what has not been read would reset the connection, and the client might lose the reply.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)

    def _close_after_end(self) -> None:
        """Closes once the client sends no more and everything that it sent in full is answered."""
        is_all_parsed = not self._unparsed and not self.pipeline and self._refusal is None
        if self._is_at_end and is_all_parsed and (self._is_idle or self._in_body):
            self.transport.close()

    # --- limits ---------------------------------------------------------------------------------------------------

    @property
    def _has_too_much_head(self) -> bool:
        return self._num_headers > self._max_headers or self._head_bytes > self._max_head_bytes

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        if self._is_idle:
            self.transport.close()
        else:  # an earlier request is still being answered
            self._head_timer = self.loop.call_later(_HEAD_TIMEOUT_S, self._on_head_timeout)

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
            self._refuse(_BODY_STOPPED)

    def _stop_timers(self) -> None:
        self._stop_head_timer()
        self._stop_body_timer()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_body_timer(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None


def _leave(cycle: RequestResponseCycle) -> None:
    """For the application nobody is there any more."""
    cycle.disconnected = True
    cycle.message_event.set()


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


_NO_HTTP = ErrorReply(400, "invalid_request_error", "Invalid HTTP request received.", code="invalid_http")
_BODY_STOPPED = ErrorReply(
    408,
    "invalid_request_error",
    f"the request's body is incomplete and nothing of it has come for {_BODY_TIMEOUT_S:g} s",
    code="request_timeout",
)


def _too_large_head(limits: HeadLimits) -> ErrorReply:
    allowed = f"{limits.max_headers} headers and {limits.max_bytes} bytes"
    message = f"the request's head is too large: at most {allowed} are allowed"
    return ErrorReply(431, "invalid_request_error", message, code="headers_too_large")
