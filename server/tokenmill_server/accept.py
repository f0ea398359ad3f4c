"""One listening socket for several API servers, with accepts balanced by open connections.

Each server writes how many connections it has open into its own cell of a memory-mapped file that all of them read.
A server that has more than the least busy one lets the others go first for a moment, then takes what is still there:
a server that hangs, or died and left its count behind, delays connections by milliseconds but never stops them, and
soon nobody waits for it any more. Servers with the same number take turns: whoever took one last lets the others go
first, for a shorter moment.

A server that starts beside busy ones, because it replaces a dead one, has no connections. It must not get every new
one until it has as many as the others: clients that come back all at once would meet in one process. It counts itself
as busy as the least busy one and gives that up by half a connection with each one that it takes, so it gets twice as
many as any other until it has caught up.
"""

import asyncio
import logging
import mmap
import select
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path

from tokenmill_engine.ipc.files import reserve

logger = logging.getLogger(__name__)

_CELL_BYTES = 8
_NOT_ACCEPTING = -1.0
_HEAD_START_PER_ACCEPT = 0.5
_BACK_OFF_S = 0.001
_MAX_BACK_OFFS = 5
_MAX_BACK_OFFS_OF_EQUALS = 2
_SILENCE_S = 0.25
"""A server that has let connections wait for so long without taking one, or losing one, is not waited for until it
does."""
_RESOURCE_PAUSE_S = 0.1
"""Wait after running out of file descriptors."""


class ConnectionCounts:
    """Open connections of every API server, and when it took the last one (`time.monotonic`), as pairs of float64.
    Writing is for one's own pair only."""

    def __init__(self, path: Path, num_servers: int, own: int) -> None:
        size = 2 * _CELL_BYTES * num_servers
        reserve(path, size)
        with path.open("r+b") as file:
            cells = memoryview(mmap.mmap(file.fileno(), size)).cast("d")
        self._counts, self._taken_at = cells[:num_servers], cells[num_servers:]
        self._own = own
        self._others = [server for server in range(num_servers) if server != own]
        self._count = 0
        self._is_accepting = True
        self._head_start = self._least_of_others()
        """What this server counts itself busier than it is."""
        self._missed: dict[int, tuple[tuple[float, float], float]] = {}
        """Pairs of servers that let a connection wait, and since when (`time.monotonic`) they stand."""
        self._write()

    def opened(self) -> None:
        self._count += 1
        self._head_start = max(0.0, self._head_start - _HEAD_START_PER_ACCEPT)
        self._taken_at[self._own] = time.monotonic()
        self._write()

    def closed(self) -> None:
        self._count -= 1
        self._write()

    def leave(self) -> None:
        """This server accepts no more; nobody waits for it."""
        self._is_accepting = False
        self._write()

    def num_back_offs(self) -> int:
        """How many moments to let other servers go first: 0 for the one whose turn it is."""
        if self._head_start:  # connections that others lose are not to be made up for
            self._head_start = min(self._head_start, max(0.0, self._least_of_others() + 1 - self._count))
            self._write()
        awaited = [server for server in self._others if self._is_awaited(server)]
        if any(self._counts[server] < self._counts[self._own] for server in awaited):
            return _MAX_BACK_OFFS
        return _MAX_BACK_OFFS_OF_EQUALS if awaited else 0

    def miss(self) -> None:
        """Those that were let go first have let a connection wait."""
        now = time.monotonic()
        for server in self._others:
            if self._is_awaited(server):
                pair = self._pair(server)
                if self._missed.get(server, (None, 0.0))[0] != pair:
                    self._missed[server] = pair, now

    def _is_awaited(self, server: int) -> bool:
        """Whether it is rather the turn of `server`, and it reacts."""
        pair = self._pair(server)
        if pair[0] == _NOT_ACCEPTING or pair >= self._pair(self._own):
            return False
        missed, since = self._missed.get(server, (None, 0.0))
        return pair != missed or time.monotonic() - since < _SILENCE_S

    def _pair(self, server: int) -> tuple[float, float]:
        return self._counts[server], self._taken_at[server]

    def _least_of_others(self) -> float:
        counts = (count for server in self._others if (count := self._counts[server]) != _NOT_ACCEPTING)
        return min(counts, default=0.0)

    def _write(self) -> None:
        self._counts[self._own] = self._count + self._head_start if self._is_accepting else _NOT_ACCEPTING


class Acceptor:
    """Accepts connections from `listener` on the running event loop and gives each a protocol of its own, which
    calls `counts.closed` when its connection is lost."""

    def __init__(
        self,
        listener: socket.socket,
        counts: ConnectionCounts,
        protocol_factory: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._counts = counts
        self._protocol_factory = protocol_factory
        self._tls = tls
        self._num_back_offs = 0
        self._timer: asyncio.TimerHandle | None = None
        self._connecting: set[asyncio.Task[None]] = set()
        self._is_open = False
        self._poller = select.poll()
        self._poller.register(listener, select.POLLIN)
        listener.setblocking(False)

    def open(self) -> None:
        """Starts accepting, if it has not."""
        if not self._is_open:
            self._is_open = True
            self._watch()

    def close(self) -> None:
        """Stops accepting. The listener stays open: others share it."""
        self._loop.remove_reader(self._listener.fileno())
        if self._timer is not None:
            self._timer.cancel()
        self._counts.leave()

    def _watch(self) -> None:
        self._timer = None
        if self._num_back_offs and not self._poller.poll(0):
            self._num_back_offs = 0  # another server took what this one waited with
        self._loop.add_reader(self._listener.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        if self._num_back_offs < self._counts.num_back_offs():
            self._num_back_offs += 1
            self._pause(_BACK_OFF_S)
            return
        if self._num_back_offs:
            self._counts.miss()
            self._num_back_offs = 0
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another server was faster, or the client gave up
        except OSError as error:
            logger.warning("cannot accept a connection: %s", error)
            self._pause(_RESOURCE_PAUSE_S)
            return
        self._counts.opened()
        task = self._loop.create_task(self._connect(connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._timer = self._loop.call_later(seconds, self._watch)

    async def _connect(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await self._loop.connect_accepted_socket(self._protocol_factory, connection, ssl=self._tls)
        except OSError as error:
            logger.debug("a connection was lost while it was accepted: %s", error)
            self._counts.closed()
            connection.close()
