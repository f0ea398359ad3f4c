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
    assert first.is_least_busy()
    first.opened()
    assert not first.is_least_busy()
    second.opened()
    third.opened()
    assert first.is_least_busy()
    third.closed()
    assert not second.is_least_busy()


async def test_nobody_waits_for_a_server_that_left(tmp_path: Path) -> None:
    first, second = counts(tmp_path, 2)
    first.opened()
    second.leave()
    assert first.is_least_busy()


async def test_a_restarted_server_begins_at_zero(tmp_path: Path) -> None:
    first, second = counts(tmp_path, 2)
    second.opened()
    first.opened()
    assert first.is_least_busy()
    ConnectionCounts(tmp_path / "counts", 2, own=1)
    assert not first.is_least_busy()


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
        async with asyncio.timeout(5):
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
