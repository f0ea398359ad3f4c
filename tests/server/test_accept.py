import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tokenmill_server.accept import Acceptor, ConnectionCounts

pytestmark = pytest.mark.asyncio


def counts(tmp_path: Path, num_servers: int = 3) -> list[ConnectionCounts]:
    return [ConnectionCounts(tmp_path / "counts", num_servers, own) for own in range(num_servers)]


async def test_least_busy_is_who_has_no_more_than_any_other(tmp_path: Path) -> None:
    first, second, third = counts(tmp_path)
    assert first.num_back_offs() == 0
    first.opened()
    assert first.num_back_offs() == 5
    second.opened()
    third.opened()
    assert first.num_back_offs() == 0
    third.closed()
    assert second.num_back_offs() == 5


async def test_equals_take_turns(tmp_path: Path) -> None:
    """Also if each connection is over before the next one comes."""
    everyone = counts(tmp_path, 4)
    turns = []
    for _ in range(12):
        index = [server.num_back_offs() for server in everyone].index(0)
        everyone[index].opened()
        everyone[index].closed()
        turns.append(index)
    assert sorted(turns[:4]) == [0, 1, 2, 3]
    assert turns == 3 * turns[:4]
    assert 0 < everyone[turns[-1]].num_back_offs() < 5


async def test_nobody_waits_for_a_server_that_left(tmp_path: Path) -> None:
    first, second = counts(tmp_path, 2)
    first.opened()
    second.leave()
    assert first.num_back_offs() == 0


async def test_a_server_that_left_stays_away_while_its_connections_end(tmp_path: Path) -> None:
    first, second = counts(tmp_path, 2)
    for _ in range(2):
        first.opened()
        second.opened()
    second.leave()
    second.closed()
    assert first.num_back_offs() == 0


def taken_by_each(servers: list[ConnectionCounts], num_connections: int) -> list[int]:
    """How many of the next connections each server takes: all wake up for each, whoever is least busy takes it."""
    taken = [0] * len(servers)
    for _ in range(num_connections):
        index = [server.num_back_offs() for server in servers].index(0)
        servers[index].opened()
        taken[index] += 1
    return taken


async def test_a_restarted_server_is_neither_flooded_nor_starved(tmp_path: Path) -> None:
    """It gets twice what another gets, until it has as many, and then the same."""
    everyone = counts(tmp_path, 4)
    assert taken_by_each(everyone, 400) == [100] * 4
    everyone[1] = ConnectionCounts(tmp_path / "counts", 4, own=1)
    newcomer, *others = (taken := taken_by_each(everyone, 80))[1], *taken[:1], *taken[2:]
    assert 30 <= newcomer <= 34
    assert all(15 <= count <= 17 for count in others)
    taken = [before + after for before, after in zip(taken, taken_by_each(everyone, 420), strict=True)]
    assert 198 <= taken[1] <= 202
    assert all(abs(count - 50) <= 2 for count in taken_by_each(everyone, 200))


async def test_a_restarted_server_gets_short_connections_too(tmp_path: Path) -> None:
    """Also if the others do not all have as many."""
    everyone = counts(tmp_path, 4)
    taken_by_each(everyone, 402)
    everyone[3] = ConnectionCounts(tmp_path / "counts", 4, own=3)
    taken = [0] * 4
    for _ in range(20):
        index = [server.num_back_offs() for server in everyone].index(0)
        everyone[index].opened()
        everyone[index].closed()
        taken[index] += 1
    assert taken[3] >= 5


async def test_a_restarted_server_gives_up_its_head_start_when_the_others_lose_connections(tmp_path: Path) -> None:
    everyone = counts(tmp_path, 4)
    taken_by_each(everyone, 400)
    everyone[3] = ConnectionCounts(tmp_path / "counts", 4, own=3)
    for server in everyone[:3]:
        for _ in range(100):
            server.closed()
    assert all(9 <= count <= 11 for count in taken_by_each(everyone, 40))


async def test_a_server_that_lets_connections_wait_is_waited_for_again_when_it_reacts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("tokenmill_server.accept.time.monotonic", lambda: now)
    first, silent = counts(tmp_path, 2)
    first.opened()
    first.miss()
    now += 0.1
    assert first.num_back_offs() == 5  # it may be busy for a moment
    first.miss()
    now += 0.2
    assert first.num_back_offs() == 0
    first.opened()
    silent.opened()
    assert first.num_back_offs() == 5
    first.miss()
    now += 0.1
    assert first.num_back_offs() == 5
    now += 0.2
    assert first.num_back_offs() == 0


class _Held(asyncio.Protocol):
    """Keeps its connection until the client closes it."""

    def __init__(self, own: ConnectionCounts) -> None:
        self._counts = own

    def connection_lost(self, exc: Exception | None) -> None:
        self._counts.closed()


@contextlib.asynccontextmanager
async def listening(backlog: int = 512) -> AsyncIterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=backlog) as listener:
        yield listener


async def test_connections_are_spread_evenly(tmp_path: Path) -> None:
    """Three acceptors on one socket, as three processes would have them."""
    everyone = counts(tmp_path)
    async with listening() as listener:
        acceptors = [Acceptor(listener.dup(), own, lambda own=own: _Held(own)) for own in everyone]
        for acceptor in acceptors:
            acceptor.open()
        writers = [(await asyncio.open_connection(*listener.getsockname()))[1] for _ in range(90)]
        while sum(own._count for own in everyone) < 90:
            await asyncio.sleep(0.01)
        assert all(29 <= own._count <= 31 for own in everyone)
        for writer in writers:
            writer.close()
        while any(own._count for own in everyone):
            await asyncio.sleep(0.01)
        for acceptor in acceptors:
            acceptor.close()
            acceptor._listener.close()


async def test_a_dead_server_that_left_a_low_count_stops_nobody(tmp_path: Path) -> None:
    alive, _dead = counts(tmp_path, 2)
    async with listening() as listener:
        acceptor = Acceptor(listener, alive, lambda: _Held(alive))
        acceptor.open()
        writers = [(await asyncio.open_connection(*listener.getsockname()))[1] for _ in range(5)]
        async with asyncio.timeout(60):
            while alive._count < 5:
                await asyncio.sleep(0.005)
        acceptor.close()
        for writer in writers:
            writer.close()
        while alive._count:
            await asyncio.sleep(0.005)


async def test_after_close_nothing_is_accepted(tmp_path: Path) -> None:
    (own,) = counts(tmp_path, 1)
    async with listening() as listener:
        acceptor = Acceptor(listener, own, lambda: _Held(own))
        acceptor.open()
        acceptor.close()
        _, writer = await asyncio.open_connection(*listener.getsockname())
        await asyncio.sleep(0.02)
        assert own._count == 0
        writer.close()
