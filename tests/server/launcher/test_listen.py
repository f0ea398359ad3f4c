import errno
import os
import socket
from pathlib import Path

import pytest

from tokenmill_engine.errors import ConfigError, StartupError
from tokenmill_server.config import ServerConfig
from tokenmill_server.listen import bind, release, url_of


def test_free_port_and_taken_port() -> None:
    first = bind(ServerConfig(port=0))
    port = first.getsockname()[1]
    assert url_of(first) == f"http://127.0.0.1:{port}"
    assert url_of(first, "https") == f"https://127.0.0.1:{port}"
    assert first.get_inheritable()
    with pytest.raises(StartupError, match=f"port {port} on 127.0.0.1 is already in use; .* another --port"):
        bind(ServerConfig(port=port))
    release(first)
    release(bind(ServerConfig(port=port)))


def test_connections_queue_before_anybody_accepts() -> None:
    listener = bind(ServerConfig(port=0))
    socket.create_connection(listener.getsockname(), timeout=5).close()
    release(listener)


def test_host_names_and_ipv6() -> None:
    listener = bind(ServerConfig(host="localhost", port=0))
    release(listener)
    listener = bind(ServerConfig(host="::1", port=0))
    assert url_of(listener).startswith("http://[::1]:")
    release(listener)


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("no-such-host.invalid", "--host no-such-host.invalid: "),
        ("203.0.113.1", "no address of this"),
        ("a..b", "--host a..b: not a host name"),
        ("x" * 70, "--host x+: not a host name"),
    ],
)
def test_impossible_hosts(host: str, message: str) -> None:
    with pytest.raises((ConfigError, StartupError), match=message):
        bind(ServerConfig(host=host, port=0))


def test_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    config = ServerConfig(uds=str(path))
    first = bind(config)
    assert url_of(first) == f"unix://{path}"
    with pytest.raises(StartupError, match="already in use"):
        bind(config)
    first.close()
    assert path.exists()
    second = bind(config)
    release(second)
    assert not path.exists()


def test_unix_socket_in_bad_places(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(ConfigError, match="exists and is not a socket"):
        bind(ServerConfig(uds=str(file)))
    assert file.read_text() == "precious"
    for path in (tmp_path / "none" / "s", tmp_path / ("x" * 120), tmp_path / ("x" * 300), file / "s"):
        with pytest.raises(ConfigError, match="name a short path in a writable folder"):
            bind(ServerConfig(uds=str(path)))


def test_places_that_may_not_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, who may look everywhere."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    config = ServerConfig(uds=str(tmp_path / "s"))
    bind(config).close()
    for name in ("unlink", "stat"):
        with monkeypatch.context() as patch:
            patch.setattr(f"tokenmill_server.listen.os.{name}", refuse)
            with pytest.raises(ConfigError, match="Permission denied; name a short path"):
                bind(config)
