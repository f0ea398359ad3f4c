"""ZeroMQ sockets between API servers and engine cores.

Every engine core binds two ROUTER sockets, which `Endpoints` names: one receives `ClientMessage`s, the other sends
`EngineMessage`s. Every API server connects one DEALER to each of them under `ids.client_identity`. Nothing limits the
queues (back pressure is the scheduler's business) and nothing lingers.
"""

from pathlib import Path
from typing import Any, TypeVar

import zmq

from tokenmill_engine.messages import Endpoints

SocketT = TypeVar("SocketT", bound="zmq.Socket[Any]")

_MAX_PATH_BYTES = 107
"""What the kernel accepts in `sockaddr_un.sun_path`, without the final zero."""


def local_endpoints(run_dir: str, engine: int, incarnation: int = 0) -> Endpoints:
    """Files in the launcher's private run directory, for this incarnation of engine core `engine` alone."""
    name = f"engine-{engine}.{incarnation}"
    return Endpoints(f"ipc://{_socket_path(run_dir, f'{name}.in')}", f"ipc://{_socket_path(run_dir, f'{name}.out')}")


def bound_endpoint(socket: "zmq.Socket[Any]") -> str:
    """Where others reach a bound socket: its address, with the port that the system chose."""
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0")


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
