import asyncio
import json

import pytest

from tokenmill_engine.errors import EngineError
from tokenmill_server.processing.sse import EventBuffer, event

pytestmark = pytest.mark.asyncio


class Connection:
    """A sink that can be told to refuse."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.full = False

    def __call__(self, data: bytes) -> bool:
        if not self.full:
            self.taken.append(data)
        return not self.full


async def test_event() -> None:
    assert event({"text": 'é"\n'}) == 'data: {"text":"é\\"\\n"}\n\n'.encode()


async def test_an_event_is_one_line_for_every_client() -> None:
    text = "".join(chr(code) for code in [*range(0x100), *range(0x2000, 0x2100)])
    line = event({"text": text}).decode().removesuffix("\n\n")
    assert line.splitlines() == [line]
    assert json.loads(line.removeprefix("data: ")) == {"text": text}


async def test_a_reader_gets_everything_written_so_far() -> None:
    buffer = EventBuffer()
    buffer.write(b"a")
    buffer.write(b"b")
    assert await buffer.read() == b"ab"


async def test_a_waiting_reader_is_woken() -> None:
    buffer = EventBuffer()
    reading = asyncio.ensure_future(buffer.read())
    await asyncio.sleep(0)
    assert not reading.done()
    buffer.write(b"a")
    buffer.write(b"b")
    assert await reading == b"ab"


async def test_an_attached_sink_gets_everything_at_once() -> None:
    buffer, connection = EventBuffer(), Connection()
    buffer.attach(connection)
    reading = asyncio.ensure_future(buffer.read())
    await asyncio.sleep(0)
    buffer.write(b"a")
    await asyncio.sleep(0)
    assert connection.taken == [b"a"]
    assert not reading.done()
    buffer.close()
    assert await reading == b""


async def test_the_last_bytes_are_left_to_the_reader() -> None:
    buffer, connection = EventBuffer(), Connection()
    buffer.attach(connection)
    reading = asyncio.ensure_future(buffer.read())
    await asyncio.sleep(0)
    buffer.write(b"a")
    buffer.finish(b"end")
    assert (await reading, connection.taken, buffer.closed) == (b"end", [b"a"], True)


async def test_nothing_overtakes_what_the_sink_refused() -> None:
    buffer, connection = EventBuffer(), Connection()
    buffer.attach(connection)
    connection.full = True
    buffer.write(b"a")
    connection.full = False
    buffer.write(b"b")
    buffer.attach(connection)
    buffer.write(b"c")
    assert connection.taken == []
    assert await buffer.read() == b"abc"
    buffer.attach(connection)
    buffer.write(b"d")
    assert connection.taken == [b"d"]


async def test_an_error_closes_it() -> None:
    buffer, error = EventBuffer(), EngineError("m")
    buffer.write(b"a")
    buffer.close(error)
    assert (await buffer.read(), await buffer.read()) == (b"a", b"")
    assert (buffer.closed, buffer.error) == (True, error)
    connection = Connection()
    buffer.attach(connection)
    buffer.write(b"b")
    assert connection.taken == []
