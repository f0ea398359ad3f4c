"""Four API servers on one port: each gets its share of the connections, whatever clients do with them."""

import random
import socket
from collections.abc import Iterator

import psutil
import pytest

from tests.support.connections import (
    GET_MODELS,
    close_all,
    connect,
    read_answers,
    taken_by_each,
    wait_until_taken,
)
from tests.support.server import PATIENCE_S, Server, wait_for
from tests.support.streams import raw_request

pytestmark = pytest.mark.slow

NUM_CONNECTIONS = 400
FAIR = NUM_CONNECTIONS / 4
LIMIT = 1.25 * FAIR
CHANCE = random.Random(4)
"""Who leaves next."""
ENDLESS = {"prompt": "Once", "max_tokens": 60000, "ignore_eos": True, "stream": True}


@pytest.fixture
def connections() -> Iterator[list[socket.socket]]:
    """Closed at the end."""
    connections: list[socket.socket] = []
    yield connections
    close_all(connections)


def come_and_go(server: Server, connections: list[socket.socket], num_turns: int, send: bytes = b"") -> None:
    """In each turn ten clients leave and ten others come."""
    for _ in range(num_turns):
        for _ in range(10):
            connections.pop(CHANCE.randrange(len(connections))).close()
        connections += [connect(server, send) for _ in range(10)]


def test_one_short_connection_after_another(scaled_server: Server) -> None:
    """Each is over before the next one comes, so all servers have none whenever one comes."""
    scaled_server.drop_connections()
    taken = [0] * 4
    for _ in range(100):
        with connect(scaled_server, GET_MODELS) as connection:
            read_answers(connection)
            taken = [sum(pair) for pair in zip(taken, taken_by_each(scaled_server, [connection]), strict=True)]
    assert max(taken) <= 1.25 * 25


@pytest.mark.parametrize("send", [b"", GET_MODELS, 5 * GET_MODELS], ids=["silent", "asking", "pipelining"])
def test_a_burst(scaled_server: Server, connections: list[socket.socket], send: bytes) -> None:
    """A connection counts as one, whether its client says nothing, asks, or asks five times at once; and all of them
    are answered."""
    connections += [connect(scaled_server, send) for _ in range(NUM_CONNECTIONS)]
    assert max(wait_until_taken(scaled_server, connections)) <= LIMIT
    for connection in connections:
        assert all(b'"data"' in body for body in read_answers(connection, send.count(b"GET")))


def test_clients_that_come_and_go(scaled_server: Server, connections: list[socket.socket]) -> None:
    connections += [connect(scaled_server, GET_MODELS) for _ in range(NUM_CONNECTIONS)]
    for _ in range(5):
        come_and_go(scaled_server, connections, num_turns=10, send=GET_MODELS)
        assert max(wait_until_taken(scaled_server, connections)) <= LIMIT


def test_streams_between_short_requests(scaled_server: Server, connections: list[socket.socket]) -> None:
    """Both are spread: the streams alone, and all together while short ones come and go."""
    streams = [raw_request(scaled_server.url, "/v1/completions", ENDLESS) for _ in range(40)]
    try:
        assert max(wait_until_taken(scaled_server, streams)) <= 1.25 * 10
        connections += [connect(scaled_server, GET_MODELS) for _ in range(NUM_CONNECTIONS - 40)]
        come_and_go(scaled_server, connections, num_turns=20, send=GET_MODELS)
        assert max(wait_until_taken(scaled_server, streams + connections)) <= LIMIT
    finally:
        close_all(streams)
    scaled_server.check_idle()


def test_a_killed_api_server_whose_successor_gets_its_share(
    scaled_server: Server, connections: list[socket.socket]
) -> None:
    """Clients that come back all at once do not all meet in the newcomer, which has no connections yet; it gets some
    as well as the others, and as soon as enough clients have come and gone it has as many."""
    connections += [connect(scaled_server) for _ in range(NUM_CONNECTIONS)]
    wait_until_taken(scaled_server, connections)
    victim = scaled_server.api_server_pids()[1]
    scaled_server.kill(victim)
    newcomer = wait_for_newcomer(scaled_server, victim)
    assert psutil.Process(newcomer).is_running()
    again = [connect(scaled_server) for _ in range(100)]
    connections += again
    wait_for(lambda: sum(taken_by_each(scaled_server, again)) == 100, PATIENCE_S, "accepted connections")
    taken = taken_by_each(scaled_server, again)
    assert 15 <= taken[1] <= 75
    assert all(taken)
    come_and_go(scaled_server, connections, num_turns=60)
    wait_for(
        lambda: max(taken_by_each(scaled_server, connections)) <= LIMIT, PATIENCE_S, "connections of an even number"
    )
    scaled_server.check_alive()


def wait_for_newcomer(server: Server, victim: int) -> int:
    """The process that has taken the place of `victim` and taken a connection."""

    def accepts() -> bool:
        pids = server.api_server_pids()
        if victim in pids or len(pids) < 4:
            return False
        with connect(server, GET_MODELS) as connection:
            read_answers(connection)
            return taken_by_each(server, [connection])[1] == 1

    wait_for(accepts, PATIENCE_S, "a newcomer that accepts")
    return server.api_server_pids()[1]
