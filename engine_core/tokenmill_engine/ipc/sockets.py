"""ZeroMQ sockets between API servers and engine cores.

Every engine core binds two ROUTER sockets, which `Endpoints` names: one receives `ClientMessage`s, the other sends
`EngineMessage`s. Every API server connects one DEALER to each of them under `ids.client_identity`. Nothing
makes a sender wait (back pressure is the scheduler's business) and nothing lingers.

Between machines the sockets are TCP, and both ends speak CURVE: who binds has a secret key, who connects must know the
public key that belongs to it. No network carries that one: launchers work it out (`authentication.engine_key`) and
tell API servers over socket pairs. Whoever does not know it gets no connection.
"""

from pathlib import Path
from typing import Any, TypeVar

import zmq

from tokenmill_engine.messages import Endpoints

SocketT = TypeVar("SocketT", bound="zmq.Socket[Any]")

_MAX_PATH_BYTES = 107
"""What the kernel accepts in `sockaddr_un.sun_path`, without the final zero."""
_RECONNECT_MS = 1000
"""Until ZeroMQ mends a broken connection by itself: late enough for its end to be noticed before."""
_TCP_KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 15,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
"""Idle connections stay in the memory of what is on the way; seconds, and a number of probes."""


def local_endpoints(run_dir: str, engine: int, incarnation: int = 0) -> Endpoints:
    """Files in the launcher's private run directory, for this incarnation of engine core `engine` alone."""
    name = f"engine-{engine}.{incarnation}"
    return Endpoints(f"ipc://{_socket_path(run_dir, f'{name}.in')}", f"ipc://{_socket_path(run_dir, f'{name}.out')}")


def is_remote(endpoints: Endpoints) -> bool:
    """Whether they may be on another machine, where connections break though both ends live."""
    return endpoints.output.startswith("tcp://")


def bound_endpoint(socket: "zmq.Socket[Any]") -> str:
    """Where others reach a bound socket: its address, with the port that the system chose."""
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0")


def public_key(secret_key: str) -> str:
    """What the other end of a socket with this CURVE key must know; both are Z85 text, or empty."""
    return zmq.curve_public(secret_key.encode()).decode() if secret_key else ""


def bind_router(
    context: "zmq.Context[SocketT]",
    endpoint: str,
    *,
    secret_key: str = "",
    mandatory: bool = False,
    max_queued: int = 0,
) -> SocketT:
    """A bound ROUTER. A peer that comes back under its old identity replaces the old connection.

    With a `secret_key`, only peers that know its public key are let in. With `mandatory`, sending to a peer that is not
    connected raises `zmq.ZMQError` (EHOSTUNREACH); without, the message is dropped. So it is, or EAGAIN, to one for
    which `max_queued` messages wait; 0: there is no limit.
    """
    socket = context.socket(zmq.ROUTER)
    _set_common_options(socket, endpoint)
    socket.setsockopt(zmq.SNDHWM, max_queued)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    if mandatory:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if secret_key:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key.encode())
    socket.bind(endpoint)
    return socket


def connect_dealer(context: "zmq.Context[SocketT]", endpoint: str, identity: bytes, server_key: str = "") -> SocketT:
    """A DEALER connected under `identity`, to a socket whose public key is `server_key` if it has one.

    Messages have one frame; works with plain and asyncio contexts.
    """
    socket = context.socket(zmq.DEALER)
    _set_common_options(socket, endpoint)
    socket.setsockopt(zmq.ROUTING_ID, identity)
    if endpoint.startswith("tcp://"):
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    if server_key:
        public, secret = zmq.curve_keypair()
        socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.connect(endpoint)
    return socket


def _set_common_options(socket: "zmq.Socket[Any]", endpoint: str) -> None:
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, int(endpoint.startswith("tcp://[")))
    for option, value in _TCP_KEEPALIVE.items():
        socket.setsockopt(option, value)


def _socket_path(run_dir: str, name: str) -> str:
    path = str(Path(run_dir) / name)
    if len(path.encode()) > _MAX_PATH_BYTES:
        raise ValueError(f"socket path {path} is longer than {_MAX_PATH_BYTES} bytes; set TMPDIR to a shorter folder")
    return path
