"""ZeroMQ sockets between API servers and engine cores.

Engine core k binds two ROUTER sockets in the launcher's private run directory: `engine-k.in` receives
`ClientMessage`s, `engine-k.out` sends `EngineMessage`s. Every API server connects one DEALER to each of them under
`ids.client_identity`. Nothing limits the queues (back pressure is the scheduler's business) and nothing lingers.
"""

from pathlib import Path
from typing import Any, TypeVar

import zmq

SocketT = TypeVar("SocketT", bound="zmq.Socket[Any]")

_MAX_PATH_BYTES = 107
"""What the kernel accepts in `sockaddr_un.sun_path`, without the final zero."""


def input_endpoint(run_dir: str, engine: int) -> str:
    """Where engine core `engine` receives."""
    return f"ipc://{_socket_path(run_dir, f'engine-{engine}.in')}"


def output_endpoint(run_dir: str, engine: int) -> str:
    """Where engine core `engine` sends."""
    return f"ipc://{_socket_path(run_dir, f'engine-{engine}.out')}"


def bind_router(context: "zmq.Context[SocketT]", endpoint: str, *, mandatory: bool = False) -> SocketT:
    """A bound ROUTER. A peer that comes back under its old identity replaces the old connection.

    With `mandatory`, sending to a peer that is not connected raises `zmq.ZMQError` (EHOSTUNREACH); without, the
    message is dropped.
    """
    socket = context.socket(zmq.ROUTER)
    _set_common_options(socket)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    if mandatory:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.bind(endpoint)
    return socket


def connect_dealer(context: "zmq.Context[SocketT]", endpoint: str, identity: bytes) -> SocketT:
    """A DEALER connected under `identity`. Messages have one frame; works with plain and asyncio contexts."""
    socket = context.socket(zmq.DEALER)
    _set_common_options(socket)
    socket.setsockopt(zmq.ROUTING_ID, identity)
    socket.connect(endpoint)
    return socket


def _set_common_options(socket: "zmq.Socket[Any]") -> None:
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)


def _socket_path(run_dir: str, name: str) -> str:
    path = str(Path(run_dir) / name)
    if len(path.encode()) > _MAX_PATH_BYTES:
        raise ValueError(f"socket path {path} is longer than {_MAX_PATH_BYTES} bytes; set TMPDIR to a shorter folder")
    return path
