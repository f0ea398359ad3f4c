"""Connections to a server with several API servers: who has taken which, as the kernel tells."""

import socket
from collections.abc import Iterable

import httpx
import psutil

from tests.support.exposition import samples
from tests.support.server import Server, wait_for

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
    ports = {connection.getsockname()[1] for connection in connections}
    taken = []
    for pid in server.api_server_pids():
        peers = [at.raddr.port for at in psutil.Process(pid).net_connections("tcp") if at.raddr]
        taken.append(len(ports.intersection(peers)))
    return taken


def wait_until_taken(server: Server, connections: list[socket.socket]) -> list[int]:
    """`taken_by_each` once it is all of them."""
    wait_for(lambda: sum(taken_by_each(server, connections)) == len(connections), 30, "accepted connections")
    return taken_by_each(server, connections)


def close_all(connections: list[socket.socket]) -> None:
    for connection in connections:
        connection.close()
    connections.clear()


def read_answers(connection: socket.socket, count: int = 1) -> list[bytes]:
    """The bodies of the next `count` answers, which are of known length and the last ones that are under way."""
    bodies = []
    with connection.makefile("rb") as stream:
        for _ in range(count):
            length = 0
            while (line := stream.readline().strip().lower()) != b"":
                if line.startswith(b"content-length:"):
                    length = int(line.partition(b":")[2])
            bodies.append(stream.read(length))
    return bodies


def scrape_each(server: Server) -> list[dict[str, float]]:
    """The metrics as each of the API servers tells them, in the order of their numbers."""
    connections: list[socket.socket] = []
    try:
        while len(connections) < 64 and not all(taken_by_each(server, connections)):
            connections.append(connect(server))
            wait_until_taken(server, connections)
        pages = []
        for index in range(len(server.api_server_pids())):
            connection = next(c for c in connections if taken_by_each(server, [c])[index])
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            pages.append(samples(read_answers(connection)[0].decode()))
        return pages
    finally:
        close_all(connections)
