"""Notices when the connection to an engine core on another machine breaks.

ZeroMQ connects again by itself, but what was on the way is lost without a word: tokens, or the end of an answer. So a
broken connection counts as a lost engine core, until it is greeted anew.
"""

import asyncio
from collections.abc import Callable, Sequence

import zmq


class ConnectionWatch:
    """Watches connected sockets; `on_broken` is called once, from the event loop, when one of them is cut off."""

    def __init__(self, sockets: Sequence["zmq.Socket[bytes]"], on_broken: Callable[[], None]) -> None:
        self._on_broken = on_broken
        self._watched = [(socket, socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)) for socket in sockets]
        self._loop = asyncio.get_running_loop()
        for _, monitor in self._watched:
            self._loop.add_reader(_option(monitor, zmq.FD), self._look)
        # A descriptor signals nothing before somebody has looked.
        self._loop.call_soon(self._look)

    def close(self) -> None:
        """Stops watching; the sockets stay open. May be called twice."""
        for socket, monitor in self._watched:
            self._loop.remove_reader(_option(monitor, zmq.FD))
            socket.disable_monitor()
            monitor.close()
        self._watched = []

    def _look(self) -> None:
        """The descriptors signal changes of any kind: only a message says that a connection is gone."""
        events = [_option(monitor, zmq.EVENTS) for _, monitor in self._watched]
        if any(event & zmq.POLLIN for event in events):
            self.close()
            self._on_broken()


def _option(socket: "zmq.Socket[bytes]", option: int) -> int:
    return int(socket.getsockopt(option))
