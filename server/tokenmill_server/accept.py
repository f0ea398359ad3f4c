"""One listening socket for several API servers, with accepts balanced by open connections.

Each server writes how many connections it has open into its own cell of a memory-mapped file that all of them read.
A server that has more than the least busy one lets the others go first for a moment, then takes what is still there:
a server that hangs, or died and left its count behind, delays connections by milliseconds but never stops them.
"""

import asyncio
import logging
import mmap
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from tokenmill_engine.ipc.files import reserve

logger = logging.getLogger(__name__)

_CELL = struct.Struct("=q")
_NOT_ACCEPTING = -1
_BACK_OFF_S = 0.001
_MAX_BACK_OFFS = 5
_RESOURCE_PAUSE_S = 0.1
"""Wait after running out of file descriptors."""


class ConnectionCounts:
    """Open connections of every API server. Writing is for one's own cell only."""

    def __init__(self, path: Path, num_servers: int, own: int) -> None:
        size = _CELL.size * num_servers
        reserve(path, size)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)
        self._num_servers = num_servers
        self._own = own
        self._count = 0
        self._write(0)

    def opened(self) -> None:
        self._count += 1
        self._write(self._count)

    def closed(self) -> None:
        self._count -= 1
        self._write(self._count)

    def leave(self) -> None:
        """This server accepts no more; nobody waits for it."""
        self._write(_NOT_ACCEPTING)

    def is_least_busy(self) -> bool:
        """Whether no accepting server has fewer open connections than this one."""
        counts = (_CELL.unpack_from(self._map, _CELL.size * server)[0] for server in range(self._num_servers))
        return self._count <= min((count for count in counts if count != _NOT_ACCEPTING), default=0)

    def _write(self, count: int) -> None:
        _CELL.pack_into(self._map, _CELL.size * self._own, count)


class Acceptor:
    """Accepts connections from `listener` on the running event loop and gives each a protocol of its own, which
    calls `counts.closed` when its connection is lost."""

    def __init__(
        self, listener: socket.socket, counts: ConnectionCounts, protocol_factory: Callable[[], asyncio.Protocol]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._counts = counts
        self._protocol_factory = protocol_factory
        self._num_back_offs = 0
        self._timer: asyncio.TimerHandle | None = None
        self._connecting: set[asyncio.Task[None]] = set()
        self._is_open = False
        listener.setblocking(False)

    def open(self) -> None:
        self._is_open = True
        self._watch()

    def close(self) -> None:
        """Stops accepting. The listener stays open: others share it."""
        self._is_open = False
        self._loop.remove_reader(self._listener.fileno())
        if self._timer is not None:
            self._timer.cancel()
        self._counts.leave()

    def _watch(self) -> None:
        self._timer = None
        self._loop.add_reader(self._listener.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        if self._num_back_offs < _MAX_BACK_OFFS and not self._counts.is_least_busy():
            self._num_back_offs += 1
            self._pause(_BACK_OFF_S)
            return
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
            await self._loop.connect_accepted_socket(self._protocol_factory, connection)
        except OSError as error:
            logger.debug("a connection was lost while it was accepted: %s", error)
            self._counts.closed()
            connection.close()
