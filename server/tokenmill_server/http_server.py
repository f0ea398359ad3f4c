"""uvicorn's HTTP/1.1 protocol on our own accept loop: the launcher binds, several processes accept."""

import asyncio
import socket
from collections.abc import Callable
from email.utils import formatdate

import uvicorn
from starlette.types import ASGIApp, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from tokenmill_server.accept import Acceptor, ConnectionCounts
from tokenmill_server.errors import ErrorReply

_KEEP_ALIVE_S = 75
"""Idle connections stay open longer than the pools of common clients and proxies (60 s) keep them."""
MAX_HEADERS = 256
MAX_HEAD_BYTES = 256 * 1024
"""Of a request's first line and headers together."""
_HEAD_TIMEOUT_S = 60.0
"""How long a client may take to send a request's head, from its connection or the head's first byte on."""
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
        self._acceptor = Acceptor(listener, counts, self._new_protocol)
        self._set_date()

    def open(self) -> None:
        """Starts accepting."""
        self._acceptor.open()

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
        return _CountedProtocol(self._config, self._state, self._counts)

    def _set_date(self) -> None:
        self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        self._loop.call_later(_DATE_PERIOD_S, self._set_date)


def direct_sink(send: Send) -> Callable[[bytes], bool] | None:
    """A function that puts a body chunk straight on the connection to which `send` belongs, without a coroutine and
    a task switch for every token. It refuses while the client reads too slowly; `send` waits for it then.

    None if `send` is not this server's own, or the response has not begun or is not chunked.
    """
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle) or not cycle.chunked_encoding:
        return None
    flow, write = cycle.flow, cycle.transport.write

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
    """Tells when its connection is over. Takes request heads of a limited size, in a limited time."""

    def __init__(self, config: uvicorn.Config, state: ServerState, counts: ConnectionCounts) -> None:
        super().__init__(config=config, server_state=state, app_state={})
        self._counts = counts
        self._in_head = False
        self._num_headers = 0
        self._head_bytes = 0
        """Of complete headers."""
        self._open_head_bytes = 0
        """Received for a head that is not complete yet: the parser collects one header in memory whatever its size."""
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(_HEAD_TIMEOUT_S, self._on_head_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._counts.closed()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
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
        super().on_headers_complete()

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

    def _refuse(self, reply: ErrorReply) -> None:
        """Answers what is no request, unless it came in the middle of another answer; closes the connection."""
        if self._is_idle:
            body = reply.json()
            self.transport.write(
                STATUS_LINE[reply.status]
                + b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
                + body
            )
        self.transport.close()


_TOO_LARGE_HEAD = ErrorReply(
    431,
    "invalid_request_error",
    f"the request's head is too large: at most {MAX_HEADERS} headers and {MAX_HEAD_BYTES} bytes are allowed",
    code="headers_too_large",
)
