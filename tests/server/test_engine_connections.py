"""An API server's connections, against engines and networks that do not behave."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from tests.support.far_engines import FarEngine, far_engines
from tokenmill_engine.config.model_files import embedded_model_path
from tokenmill_engine.errors import EngineDeadError, EngineStartingError, EngineUnavailableError
from tokenmill_engine.ipc.control import EngineDraining, EngineLost, EngineRecovered, EnginesReady, EngineStalled
from tokenmill_engine.messages import SamplingParams
from tokenmill_server.balancing.load_balancer import LoadBalancer
from tokenmill_server.engine_client import EngineClient
from tokenmill_server.engine_connections import EngineConnections
from tokenmill_server.processing.generation import GenerationRequest
from tokenmill_server.processing.tokenizer import Tokenizer, load_tokenizer
from tokenmill_server.readiness import Phase, Readiness
from tokenmill_server.text_generator import TextGenerator

pytestmark = pytest.mark.asyncio

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(str(embedded_model_path()))


class Api:
    """The part of an API server that deals with engines."""

    def __init__(self, tokenizer: Tokenizer, far: list[FarEngine]) -> None:
        self.far = far
        self.readiness = Readiness(len(far))
        self.generator = TextGenerator(EngineClient(0, 0, LoadBalancer(len(far))), tokenizer)
        self.drained: list[EngineDraining] = []
        self.connections = EngineConnections(
            self.generator, self.readiness, self._begin, on_drained=self.drained.append
        )
        self._tasks: list[asyncio.Task[bool]] = []

    def _begin(self, work: "asyncio.coroutines.Coroutine[object, object, bool]") -> "asyncio.Task[bool]":
        self._tasks.append(asyncio.create_task(work))
        return self._tasks[-1]

    @property
    def faults(self) -> list[tuple[int, str]]:
        return [(fault.engine, fault.status) for fault in self.readiness.engine_faults]

    def introduce(self, *stalled: EngineStalled) -> None:
        self.connections.introduce(EnginesReady([far.ready() for far in self.far], [], list(stalled)))

    async def generate(self, pinned: int | None = None, max_tokens: int = 2) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        await self.generator.complete(GenerationRequest("label", [504, 505], sampling, 0.0), pinned)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.generator.disconnect()


@asynccontextmanager
async def api_of(tokenizer: Tokenizer, num_engines: int, lets_in: bool = True) -> AsyncIterator[Api]:
    with far_engines(num_engines, lets_in) as far:
        api = Api(tokenizer, far)
        try:
            yield api
        finally:
            await api.close()


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_those_that_can_be_reached_do_not_wait_for_the_others(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill_server.engine_client._CONNECT_TIMEOUT_S", 2 * PATIENCE_S)
    async with api_of(tokenizer, 4, lets_in=False) as api:
        api.far[3].let_in(True)
        api.introduce()
        await api.connections.wait_for_one(PATIENCE_S)
        await api.generate()
        with pytest.raises(EngineUnavailableError):
            await api.generate(pinned=0)
        await wait_until(lambda: api.faults == [(engine, "unreachable") for engine in range(3)])
        for far in api.far:
            far.let_in(True)
        await api.connections.wait_for_all(PATIENCE_S)
        assert api.faults == []
        for engine in range(4):
            await api.generate(pinned=engine)


async def test_whoever_cannot_be_reached_is_named_and_tried_again(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill_server.engine_client._CONNECT_TIMEOUT_S", 0.3)
    async with api_of(tokenizer, 1, lets_in=False) as api:
        api.introduce()
        await api.connections.wait_for_one(0.01)
        await wait_until(lambda: api.faults == [(0, "unreachable")])
        with pytest.raises(EngineStartingError, match="engine core 0 cannot be reached"):
            api.readiness.check()
        await asyncio.sleep(1.0)  # for several attempts
        monkeypatch.setattr("tokenmill_server.engine_client._CONNECT_TIMEOUT_S", PATIENCE_S)
        api.far[0].let_in(True)
        await api.connections.wait_for_one(PATIENCE_S)
        assert (api.readiness.phase, api.faults) == (Phase.READY, [])
        await api.generate()


async def test_nobody_tries_to_reach_who_is_lost(tokenizer: Tokenizer) -> None:
    async with api_of(tokenizer, 1, lets_in=False) as api:
        api.introduce()
        await api.connections.wait_for_one(0.1)
        api.connections.lost(EngineLost(0, 0, "engine core 0 was killed"))
        await api.connections.wait_for_one(PATIENCE_S)
        assert (api.readiness.phase, api.faults) == (Phase.DEAD, [(0, "dead")])


async def test_a_stall_that_ends_before_the_engine_is_connected_is_over(tokenizer: Tokenizer) -> None:
    async with api_of(tokenizer, 1) as api:
        api.introduce(EngineStalled(0, 0, 0.0))
        api.connections.stalls(EngineRecovered(0, 0))
        await api.connections.wait_for_all(PATIENCE_S)
        assert api.faults == []


async def test_a_stalled_engine_is_stalled_also_after_its_connection_broke(tokenizer: Tokenizer) -> None:
    async with api_of(tokenizer, 2) as api:
        api.introduce(EngineStalled(1, 0, 0.0))
        await api.connections.wait_for_all(PATIENCE_S)
        assert api.faults == [(1, "stalled")]
        api.far[1].cut()
        await wait_until(lambda: api.faults == [(1, "unreachable")])
        await wait_until(lambda: api.faults == [(1, "stalled")])
        for _ in range(4):
            await api.generate()
        assert len(api.far[0].engine.added) == 4


async def test_a_broken_connection_counts_at_once_and_what_is_open_there_fails(tokenizer: Tokenizer) -> None:
    async with api_of(tokenizer, 2) as api:
        api.introduce()
        await api.connections.wait_for_all(PATIENCE_S)
        api.far[1].engine.paused.set()
        waiting = asyncio.create_task(api.generate(pinned=1))
        await wait_until(lambda: api.far[1].engine.num_running == 1)
        api.far[1].let_in(False)
        api.far[1].cut()
        await wait_until(lambda: api.faults == [(1, "unreachable")])
        assert not waiting.done(), "the launcher may have a better reason to tell"
        with pytest.raises(EngineUnavailableError, match="broke"):
            await api.generate(pinned=1)
        assert api.readiness.phase is Phase.READY
        with pytest.raises(EngineDeadError, match="the connection to engine core 1 broke"):
            await waiting
        assert api.faults == [(1, "unreachable")]
        api.far[1].engine.paused.clear()
        api.far[1].let_in(True)
        await wait_until(lambda: api.faults == [])
        await api.generate(pinned=1)


async def test_nothing_is_taken_while_the_connection_to_the_only_engine_is_broken(tokenizer: Tokenizer) -> None:
    async with api_of(tokenizer, 1) as api:
        api.introduce()
        await api.connections.wait_for_all(PATIENCE_S)
        api.readiness.check()
        api.far[0].cut()
        await wait_until(lambda: api.readiness.phase is Phase.STARTING)
        assert api.readiness.reason == "the connection to engine core 0 broke"
        await wait_until(lambda: api.readiness.phase is Phase.READY)
        await api.generate()


def draining(engine: int) -> EngineDraining:
    return EngineDraining(engine, 0, f"engine core {engine} drains")


async def open_on(api: Api, engine: int) -> "asyncio.Task[None]":
    """A request that does not get on."""
    echo = api.far[engine].engine
    echo.paused.set()
    waiting = asyncio.create_task(api.generate(pinned=engine))
    await wait_until(lambda: echo.num_running == 1)
    return waiting


async def test_who_drains_finishes_what_it_has_and_gets_nothing_new(tokenizer: Tokenizer) -> None:
    async with api_of(tokenizer, 2) as api:
        api.introduce()
        await api.connections.wait_for_all(PATIENCE_S)
        waiting = await open_on(api, 1)
        api.connections.drains(draining(1))
        assert (api.readiness.phase, api.faults, api.drained) == (Phase.READY, [(1, "draining")], [])
        with pytest.raises(EngineUnavailableError, match="engine core 1 drains"):
            await api.generate(pinned=1)
        for _ in range(4):
            await api.generate()
        assert [len(far.engine.added) for far in api.far] == [4, 1]
        api.connections.drains(draining(0))
        assert api.drained == [draining(0)]
        with pytest.raises(EngineStartingError, match="engine core 0 drains"):
            api.readiness.check()
        with pytest.raises(EngineUnavailableError, match=r"engine core \d drains"):
            await api.generate()
        api.far[1].engine.paused.clear()
        await waiting
        assert api.drained == [draining(0), draining(1)]
        api.connections.lost(EngineLost(1, 0, "engine core 1 is gone", may_return=True, planned=True))
        assert api.faults == [(0, "draining"), (1, "missing")]
        api.connections.connect(msgspec.structs.replace(api.far[1].ready(), incarnation=1))
        await wait_until(lambda: api.faults == [(0, "draining")])
        await api.generate()
        await api.generate(pinned=1)
        assert api.drained == [draining(0), draining(1)]


async def test_nobody_tries_to_reach_who_drains(tokenizer: Tokenizer) -> None:
    async with api_of(tokenizer, 2, lets_in=False) as api:
        api.far[0].let_in(True)
        api.introduce()
        await api.connections.wait_for_one(PATIENCE_S)
        api.connections.drains(draining(1))
        assert (api.faults, api.drained) == ([(1, "draining")], [draining(1)])
        await api.connections.wait_for_all(PATIENCE_S)
        api.far[1].let_in(True)
        assert api.faults == [(1, "draining")]


async def test_an_api_server_that_begins_during_a_drain_is_told(tokenizer: Tokenizer) -> None:
    async with api_of(tokenizer, 2) as api:
        api.connections.introduce(EnginesReady([api.far[0].ready()], draining=[draining(1)]))
        await api.connections.wait_for_all(PATIENCE_S)
        assert (api.faults, api.drained) == ([(1, "draining")], [draining(1)])
        await api.generate()
        with pytest.raises(EngineUnavailableError, match="engine core 1 drains"):
            await api.generate(pinned=1)


async def test_what_is_open_fails_if_the_connection_breaks_during_a_drain(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody connects again."""
    async with api_of(tokenizer, 2) as api:
        api.introduce()
        await api.connections.wait_for_all(PATIENCE_S)
        waiting = await open_on(api, 1)
        api.connections.drains(draining(1))
        api.far[1].cut()
        with pytest.raises(EngineDeadError, match="the connection to engine core 1 broke"):
            await waiting
        assert (api.faults, api.drained) == ([(1, "draining")], [draining(1)])
        with pytest.raises(EngineUnavailableError, match="engine core 1 drains"):
            await api.generate(pinned=1)
        await api.connections.wait_for_all(PATIENCE_S)
        assert api.generator.misses(api.far[1].ready())
        assert "connecting again" not in caplog.text
