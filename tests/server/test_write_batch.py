"""How many writes reach the kernel, and that nothing is lost or out of order."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import cast

import uvloop

from tokenmill_server.write_batch import BatchedTransport, WriteBatch


class Peer(asyncio.Protocol):
    """Our end of a connection."""

    def __init__(self) -> None:
        self.lost = asyncio.get_running_loop().create_future()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(exc)


class Connection:
    """A batched transport and the other end of its socket."""

    def __init__(self, transport: asyncio.Transport, batch: WriteBatch, peer: Peer, far: socket.socket) -> None:
        self.raw = transport
        self.transport = BatchedTransport(transport, batch)
        self.peer = peer
        self.far = far

    def arrived(self) -> bytes | None:
        """What has come to the other end; None for nothing."""
        try:
            return self.far.recv(1 << 16)
        except BlockingIOError:
            return None


Scenario = Callable[[WriteBatch, Connection, Connection], Awaitable[None]]


def in_event_loop(scenario: Scenario) -> Callable[[], None]:
    """A test that runs `scenario` with two connections in the event loop of the server."""

    async def run() -> None:
        batch = WriteBatch()
        connections = []
        for _ in range(2):
            near, far = socket.socketpair()
            far.setblocking(False)
            transport, peer = await asyncio.get_running_loop().create_connection(Peer, sock=near)
            connections.append(Connection(cast(asyncio.Transport, transport), batch, peer, far))
        await scenario(batch, *connections)
        for connection in connections:
            connection.raw.abort()
            connection.far.close()
        await asyncio.sleep(0)

    return lambda: uvloop.run(run())


@in_event_loop
async def test_pieces_leave_together_after_the_turn(batch: WriteBatch, first: Connection, second: Connection) -> None:
    first.transport.write(b"a")
    second.transport.write(b"x")
    first.transport.writelines([b"b", bytearray(b"c")])
    assert (first.arrived(), second.arrived()) == (None, None)
    assert first.transport.get_write_buffer_size() == 3
    await asyncio.sleep(0.01)
    assert (first.arrived(), second.arrived()) == (b"abc", b"x")
    assert first.transport.get_write_buffer_size() == 0


@in_event_loop
async def test_few_wait_but_those_that_are_held_do(batch: WriteBatch, first: Connection, second: Connection) -> None:
    held = [BatchedTransport(second.raw, batch) for _ in range(20)]
    for transport in held:
        transport.hold(b"h")
    assert second.arrived() is None
    batch.flush()
    assert second.arrived() == b"h" * 20
    for _ in range(7):
        BatchedTransport(first.raw, batch).write(b"w")
    assert first.arrived() is None
    BatchedTransport(first.raw, batch).write(b"w")
    assert first.arrived() == b"w" * 8


@in_event_loop
async def test_a_flush_does_not_wait(batch: WriteBatch, first: Connection, second: Connection) -> None:
    first.transport.write(b"a")
    second.transport.write(b"b")
    batch.flush()
    assert (first.arrived(), second.arrived()) == (b"a", b"b")
    first.transport.write(b"c")
    await asyncio.sleep(0.01)
    assert (first.arrived(), second.arrived()) == (b"c", None)


@in_event_loop
async def test_closing_sends_what_waits(batch: WriteBatch, first: Connection, second: Connection) -> None:
    first.transport.write(b"last words")
    first.transport.close()
    second.transport.write(b"never said")
    second.transport.abort()
    assert first.transport.is_closing()
    await asyncio.gather(first.peer.lost, second.peer.lost)
    assert (first.arrived(), first.arrived()) == (b"last words", b"")
    assert second.arrived() == b""


@in_event_loop
async def test_a_lost_connection_costs_the_others_nothing(
    batch: WriteBatch, first: Connection, second: Connection
) -> None:
    first.transport.write(b"a")
    second.transport.write(b"b")
    first.raw.abort()
    await asyncio.sleep(0)
    first.transport.write(b"c")
    batch.flush()
    assert second.arrived() == b"b"


@in_event_loop
async def test_a_connection_that_cannot_be_written_to_is_aborted_alone(
    batch: WriteBatch, first: Connection, second: Connection
) -> None:
    first.transport.hold(cast(bytes, "text"))
    second.transport.hold(b"b")
    batch.flush()
    assert second.arrived() == b"b"
    await first.peer.lost
    assert first.arrived() == b""
    first.transport.hold(b"more")
    second.transport.hold(b"c")
    await asyncio.sleep(0.01)
    assert second.arrived() == b"c"


@in_event_loop
async def test_the_end_of_what_we_send(batch: WriteBatch, first: Connection, second: Connection) -> None:
    first.transport.write(b"a")
    assert first.transport.can_write_eof()
    first.transport.write_eof()
    await asyncio.sleep(0.01)
    assert (first.arrived(), first.arrived()) == (b"a", b"")
    assert first.transport.get_extra_info("socket") is not None
    first.transport.pause_reading()
    assert not first.transport.is_reading()
    first.transport.resume_reading()
    assert first.transport.is_reading()


@in_event_loop
async def test_who_gathers_flushes_by_hand(batch: WriteBatch, first: Connection, second: Connection) -> None:
    batch.gather()
    first.transport.hold(b"a")
    await asyncio.sleep(0.01)
    assert first.arrived() is None
    batch.flush()
    assert first.arrived() == b"a"
    second.transport.hold(b"b")  # the next turn is one like any other
    await asyncio.sleep(0.01)
    assert second.arrived() == b"b"


@in_event_loop
async def test_gathering_joins_what_waits_already(batch: WriteBatch, first: Connection, second: Connection) -> None:
    first.transport.hold(b"a")
    batch.gather()
    first.transport.hold(b"b")
    second.transport.hold(b"c")
    batch.flush()
    assert (first.arrived(), second.arrived()) == (b"ab", b"c")
