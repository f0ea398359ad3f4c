"""TCP connections between launchers. A host that vanishes is noticed within ten seconds, and a process that ends at
once. One that is merely stopped is not noticed here, because its kernel still answers: launchers ask each other."""

import errno
import logging
import socket
import struct
from typing import Any, TypeVar

import msgspec

from tokenmill_engine.errors import ConfigError, StartupError
from tokenmill_engine.ipc.channel import ChannelClosedError, ControlChannel

T = TypeVar("T")

logger = logging.getLogger(__name__)

_BACKLOG = 1024
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Of a launcher that has proved who it is; metric files are the longest."""
MAX_HANDSHAKE_BYTES = 64 * 1024
"""Of anybody else."""
_SILENCE_MS = 8000
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
"""Options and seconds, or a number of probes."""


def listen(address: str, port: int) -> socket.socket:
    """Where headless launchers join.

    Raises:
        ConfigError: the address is unknown.
        StartupError: it is none of this machine's, or the port is taken.
    """
    try:
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else "not a host name"
        raise ConfigError(
            f"--data-parallel-address {address}: {reason}; name an address of this machine that the others reach"
        ) from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise StartupError(_bind_problem(error, address, port)) from None
    listener.setblocking(False)
    return listener


def _bind_problem(error: OSError, address: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {address} is already in use, perhaps by another head; stop its owner, or choose another "
            "--data-parallel-rpc-port for all launchers"
        )
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges; choose a --data-parallel-rpc-port above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"--data-parallel-address {address} is no address of this machine; on the head use one that is, "
            "and add --headless on the others"
        )
    return f"cannot wait for launchers on {address} port {port}: {error.strerror}; choose another address or port"


def connect(address: str, port: int, timeout_s: float) -> socket.socket:
    """A connection to the head. Raises OSError if it cannot be had."""
    connection = socket.create_connection((address, port), timeout_s)
    connection.settimeout(None)
    return connection


def channel_over(
    connection: socket.socket,
    message_type: Any,
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    send_timeout_s: int | None = None,
) -> ControlChannel[T]:
    """Messages of `message_type` are what this end receives. An other end that does not read for `send_timeout_s` while
    this one sends is taken for dead; None: it is waited for.

    Raises:
        OSError: the connection is broken already.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_MS)
    if send_timeout_s is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", send_timeout_s, 0))
    return ControlChannel(connection, message_type, max_message_bytes=max_message_bytes)


def send_if_open(channel: ControlChannel[Any], message: msgspec.Struct) -> None:
    """Sends; if the other side is gone, whoever reads the channel hears of that."""
    try:
        channel.send(message)
    except ChannelClosedError:
        logger.debug("%s was for somebody who is gone; the end of file follows", type(message).__name__)


def shown(host: str, port: int) -> str:
    """An address as people write it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
