"""One HTTP server on our own accept loop: the launcher binds, several processes accept."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from email.utils import formatdate

import uvicorn
from starlette.types import ASGIApp, Receive, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from tokenmill_server.accept import Acceptor, ConnectionCounts
from tokenmill_server.http_connection import DEFAULT_LIMITS, HeadLimits, HttpConnection
from tokenmill_server.http_flow import Flow
from tokenmill_server.write_batch import BatchedTransport, WriteBatch

_KEEP_ALIVE_S = 75
"""Idle connections stay open longer than the pools of common clients and proxies (60 s) keep them."""
_DATE_PERIOD_S = 1.0
_POLL_S = 0.02


class HttpServer:
    """Serves one application to the connections of one shared listener."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        counts: ConnectionCounts,
        limits: HeadLimits = DEFAULT_LIMITS,
        tls: ssl.SSLContext | None = None,
    ) -> None:
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
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self.writes = WriteBatch()
        """What is written to all connections."""
        self._acceptor = Acceptor(listener, counts, self._new_protocol, tls)
        self._set_date()

    def open(self) -> None:
        """Starts accepting, if it has not."""
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
        return HttpConnection(self._config, self._state, self._counts, self.writes, self._limits)

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


def call_when_gone(receive: Receive, on_gone: Callable[[], None]) -> Callable[[], None] | None:
    """Has `on_gone` called when the client to which `receive` belongs goes, without a task that waits for it. Returns
    what ends that.

    None if `receive` is not this server's own, or the request's body is still to be read.
    """
    cycle = getattr(receive, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle) or cycle.more_body or cycle.body:
        return None
    if cycle.disconnected:
        return asyncio.get_running_loop().call_soon(on_gone).cancel
    if not isinstance(cycle.flow, Flow):
        return None
    return cycle.flow.watch(on_gone)
