"""The one listening socket of a server, bound by the launcher and inherited by every API server."""

import errno
import os
import socket
import stat

from tokenmill_engine.errors import ConfigError, StartupError
from tokenmill_server.config import ServerConfig

_BACKLOG = 4096


def bind(config: ServerConfig) -> socket.socket:
    """A listening, inheritable socket for `config`. Connections queue in it until an API server accepts.

    Raises:
        ConfigError: the host is unknown, or the Unix socket's path is unusable.
        StartupError: the address is taken.
    """
    listener = _bind_unix(config.uds) if config.uds is not None else _bind_tcp(config.host, config.port)
    listener.setblocking(False)
    listener.set_inheritable(True)
    return listener


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """What a client connects to."""
    if listener.family == socket.AF_UNIX:
        return f"unix://{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def release(listener: socket.socket) -> None:
    """Closes the socket and removes its file, if it has one."""
    path = listener.getsockname() if listener.family == socket.AF_UNIX else None
    listener.close()
    if path is not None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return


def _bind_tcp(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError) as error:  # the latter: an empty or overlong label
        reason = error.strerror if isinstance(error, socket.gaierror) else "not a host name"
        raise ConfigError(f"--host {host}: {reason}; name an address of this machine or 0.0.0.0") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Restarting on a port with old connections in TIME_WAIT works; two servers on one port do not.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _tcp_error(error, host, port) from None
    return listener


def _tcp_error(error: OSError, host: str, port: int) -> StartupError:
    if error.errno == errno.EADDRINUSE:
        return StartupError(f"port {port} on {host} is already in use; stop its owner or choose another --port")
    if error.errno == errno.EACCES:
        return StartupError(f"port {port} needs privileges; choose a --port above 1023")
    if error.errno == errno.EADDRNOTAVAIL:
        return StartupError(f"--host {host} is no address of this machine; use one that is, or 0.0.0.0")
    return StartupError(f"cannot listen on {host} port {port}: {error.strerror}; choose another --host or --port")


def _bind_unix(path: str) -> socket.socket:
    _remove_dead_socket(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _unix_error(error, path) from None
    return listener


def _unix_error(error: OSError, path: str) -> ConfigError:
    return ConfigError(f"--uds {path}: {error.strerror or error}; name a short path in a writable folder")


def _remove_dead_socket(path: str) -> None:
    """Removes the socket of a server that is gone; leaves everything else alone."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise ConfigError(f"--uds {path} exists and is not a socket; name another path")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(path)
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        _unlink(path)
    except OSError as error:
        raise _unix_error(error, path) from None
    else:
        raise StartupError(f"--uds {path} is already in use; stop its owner or name another path")


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError as error:
        raise _unix_error(error, path) from None
