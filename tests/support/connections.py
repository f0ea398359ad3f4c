"""Connections to a server with several API servers: who has taken which, as the kernel tells."""

import socket
import time
from collections.abc import Iterable

import httpx
import psutil

from tests.support.exposition import samples
from tests.support.server import PATIENCE_S, Server, wait_for

_MAX_OTHERS = 64
"""Connections that are kept so that the next one goes to somebody else."""
GET_MODELS = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


def connect(server: Server, send: bytes = b"") -> socket.socket:
    """An open connection over which `send` has gone."""
    url = httpx.URL(server.url)
    assert url.port is not None
    connection = socket.create_connection((url.host, url.port), timeout=60)
    connection.sendall(send)
    return connection


def taken_by_each(server: Server, connections: Iterable[socket.socket]) -> list[int]:
    """How many of `connections` each API server has taken, in the order of their numbers."""
    return ports_taken_by_each(server, (connection.getsockname()[1] for connection in connections))


def ports_taken_by_each(server: Server, ports: Iterable[int]) -> list[int]:
    """The same of connections from these ports."""
    wanted = set(ports)
    return [len(wanted.intersection(_peers(pid))) for pid in server.api_server_pids()]


def _peers(pid: int) -> list[int]:
    """Ports at the other ends of a process's connections. One that has just ended has none."""
    try:
        return [at.raddr.port for at in psutil.Process(pid).net_connections("tcp") if at.raddr]
    except psutil.NoSuchProcess:
        return []


def wait_until_taken(server: Server, connections: list[socket.socket]) -> list[int]:
    """`taken_by_each` once it is all of them."""
    wait_for(lambda: sum(taken_by_each(server, connections)) == len(connections), PATIENCE_S, "accepted connections")
    return taken_by_each(server, connections)


def close_all(connections: list[socket.socket]) -> None:
    for connection in connections:
        connection.close()
    connections.clear()


def read_answers(connection: socket.socket, count: int = 1) -> list[bytes]:
    """The bodies of the next `count` answers, which are of known length and the last ones that are under way."""
    return [body for _, body in _read_answers(connection, count)]


def _read_answers(connection: socket.socket, count: int) -> list[tuple[int, bytes]]:
    """Statuses and bodies."""
    answers = []
    with connection.makefile("rb") as stream:
        for _ in range(count):
            status = int(stream.readline().split()[1])
            length = 0
            while (line := stream.readline().strip().lower()) != b"":
                if line.startswith(b"content-length:"):
                    length = int(line.partition(b":")[2])
            answers.append((status, stream.read(length)))
    return answers


def meet_each(server: Server) -> list[socket.socket]:
    """A connection to each of the API servers, in the order of their numbers, once all of them accept any."""
    met: dict[int, socket.socket] = {}
    others: list[socket.socket] = []
    deadline = time.monotonic() + PATIENCE_S
    while not met.keys() >= set(pids := server.api_server_pids()):
        assert time.monotonic() < deadline, f"only {len(met)} of {len(pids)} API servers accept connections"
        if len(others) == _MAX_OTHERS:
            close_all(others)
        connection = connect(server)
        wait_until_taken(server, [connection])
        port = connection.getsockname()[1]
        taker = next((pid for pid in pids if port in _peers(pid)), None)
        if taker is None or met.setdefault(taker, connection) is not connection:
            others.append(connection)
    close_all(others)
    return [met[pid] for pid in pids]


def get_from_each(server: Server, path: str) -> list[tuple[int, bytes]]:
    """Status and body of the answer of each of the API servers, in the order of their numbers."""
    connections = meet_each(server)
    try:
        for connection in connections:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return [_read_answers(connection, 1)[0] for connection in connections]
    finally:
        close_all(connections)


def scrape_each(server: Server) -> list[dict[str, float]]:
    """The metrics as each of the API servers tells them, in the order of their numbers."""
    return [samples(body.decode()) for _, body in get_from_each(server, "/metrics")]
