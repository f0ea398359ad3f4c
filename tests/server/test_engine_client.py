"""The sockets to engine cores, where what the launcher says and what the sockets do come in any order."""

import asyncio
import itertools
import struct
import tempfile
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from tests.support.echo_engine import EchoEngine
from tests.support.far_engines import far_engines
from tokenmill_engine.errors import EngineDeadError, EngineUnavailableError
from tokenmill_engine.ipc.control import EngineLost
from tokenmill_engine.messages import AddRequest, SamplingParams, StepOutput
from tokenmill_server.balancing.load_balancer import LoadBalancer
from tokenmill_server.balancing.prompt_blocks import PromptBlocks
from tokenmill_server.engine_client import EngineClient

pytestmark = pytest.mark.asyncio

PROMPT = PromptBlocks(3, 1)


@pytest.fixture
def engines() -> Iterator[list[EchoEngine]]:
    with tempfile.TemporaryDirectory(prefix="tokenmill-test-") as run_dir:
        running = [EchoEngine(run_dir, index, incarnation=1).start() for index in range(2)]
        yield running
        for engine in running:
            engine.stop()


async def test_a_lost_incarnation_does_not_take_its_successor_out_of_rotation(engines: list[EchoEngine]) -> None:
    client = EngineClient(0, 0, LoadBalancer(2))
    client.disconnect(EngineLost(0, 0, "engine core 0 was killed"))
    for engine in engines:
        await client.connect(engine.ready())
    with pytest.raises(EngineDeadError, match="engine core 0 was killed"):
        await client.connect(msgspec.structs.replace(engines[0].ready(), incarnation=0))
    assert {client.choose_engine(PROMPT) for _ in range(4)} == {0, 1}
    client.close()


async def test_who_is_pinned_to_an_engine_that_is_not_connected_yet_may_try_again(engines: list[EchoEngine]) -> None:
    client = EngineClient(0, 0, LoadBalancer(2))
    await client.connect(engines[0].ready())
    with pytest.raises(EngineUnavailableError, match="not connected yet"):
        client.choose_engine(PROMPT, pinned=1)
    client.close()


async def test_an_attempt_that_is_cancelled_leaves_no_socket_behind() -> None:
    """A context with an open socket is never closed: the process would not end."""
    with far_engines(1, lets_in=False) as (far,):
        client = EngineClient(0, 0, LoadBalancer(1))
        attempt = asyncio.create_task(client.connect(far.ready()))
        await asyncio.sleep(0.1)
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt
        closing = threading.Thread(target=client.close, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, 30)
        assert not closing.is_alive()


@pytest.mark.parametrize(("vector_size", "most"), [(0, 64), (2**17, 2)])
async def test_an_engine_that_is_faster_does_not_keep_the_event_loop_from_all_else(
    engines: list[EchoEngine], vector_size: int, most: int
) -> None:
    """Neither by many messages nor by large ones, which are vectors of half a MiB here."""
    outputs: list[StepOutput] = []
    taken: list[int] = []
    client = EngineClient(0, 0, LoadBalancer(1), outputs.append)
    client.on_drained = lambda: taken.append(len(outputs))
    engine, num_outputs = engines[0], 20 if vector_size else 1000
    engine.vector_size = vector_size
    await client.connect(engine.ready())
    sampling = SamplingParams(temperature=0.0, max_tokens=1000)
    deadline = time.monotonic() + 60
    for number in range(1, num_outputs + 1 if vector_size else 2):
        request = AddRequest(client.new_request_id(), "label", struct.pack("<2i", 504, 505), sampling, 0.0)
        client.add(0, [request], PROMPT)
        while len(engine.added) < number or engine.num_running:
            assert time.monotonic() < deadline
            time.sleep(0.01)  # the event loop stands still: everything waits in the socket
    async with asyncio.timeout(60):
        while len(outputs) < num_outputs:
            await asyncio.sleep(0)
    assert max(after - before for before, after in itertools.pairwise([0, *taken])) <= most
    client.close()
