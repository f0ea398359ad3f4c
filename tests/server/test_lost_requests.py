"""Requests that end with their engine core are counted once, by the API server that answers them: whoever counts every
other end is gone."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager

import httpx
import pytest
from prometheus_client import CollectorRegistry

from tests.support.api_server import MODEL_NAME, Server, run_server
from tests.support.echo_engine import EchoEngine
from tests.support.far_engines import FarEngine, far_engines
from tests.support.server import wait_for
from tokenmill_engine.config.model_files import embedded_model_path
from tokenmill_engine.errors import EngineDeadError, TokenmillError
from tokenmill_engine.ipc.control import EngineBack, EngineLost
from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.metrics import FrontendMetrics
from tokenmill_server.balancing.load_balancer import LoadBalancer
from tokenmill_server.engine_client import EngineClient
from tokenmill_server.processing.generation import GenerationRequest, TokenLogprob
from tokenmill_server.processing.output_processor import Choice, Generation
from tokenmill_server.processing.tokenizer import Tokenizer, load_tokenizer
from tokenmill_server.text_generator import TextGenerator

BROKE = EngineDeadError("the connection to engine core 0 broke")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(str(embedded_model_path()))


class Nobody:
    """A listener."""

    def on_delta(
        self, choice: Choice, text: str, token_ids: Sequence[int], logprobs: list[TokenLogprob] | None
    ) -> None:
        """Does not listen."""

    def on_error(self, error: TokenmillError) -> None:
        """Nor to this."""


class Counted:
    """A generator in front of engines, and what it has counted."""

    def __init__(self, tokenizer: Tokenizer, engines: list[FarEngine]) -> None:
        self.registry = CollectorRegistry()
        metrics = FrontendMetrics("m", len(engines), 100, registry=self.registry, first_rank=4)
        self.generator = TextGenerator(EngineClient(0, 0, LoadBalancer(len(engines))), tokenizer, metrics)
        self._engines = engines

    @property
    def lost(self) -> list[float]:
        """By engine."""
        labels = {"model_name": "m", "finished_reason": "error"}
        values = [
            self.registry.get_sample_value("tokenmill:request_success_total", labels | {"engine": str(4 + engine)})
            for engine in range(len(self._engines))
        ]
        return [value for value in values if value is not None]

    async def start(self, engine: int, n: int = 1, max_tokens: int = 10**6) -> Generation:
        echo = self._engines[engine].engine
        before = len(echo.added)
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, n=n)
        generation = self.generator.start(GenerationRequest("label", [504, 505], sampling, 0.0), Nobody(), engine)
        await wait_until(lambda: len(echo.added) == before + n)
        return generation


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def counted(tokenizer: Tokenizer, num_engines: int = 1) -> AsyncIterator[tuple[Counted, list[FarEngine]]]:
    with far_engines(num_engines) as engines:
        each = Counted(tokenizer, engines)
        try:
            for far in engines:
                far.engine.step_s = 0.01  # so that what it has sent comes to an end when it is lost
                await each.generator.connect(far.ready())
            yield each, engines
        finally:
            each.generator.disconnect()


async def fail_with_connection(each: Counted, far: FarEngine) -> None:
    """Two sequences are open on engine 0 when the connection to it breaks."""
    await each.start(0, n=2)
    far.cut()
    await wait_until(lambda: each.generator.misses(far.ready()))
    each.generator.fail_engine(0, BROKE)


def lost(engine: int) -> EngineLost:
    return EngineLost(engine, 0, f"engine core {engine} was killed", restarts=True)


@pytest.mark.asyncio
async def test_every_open_sequence_counts_once_and_no_other(tokenizer: Tokenizer) -> None:
    async with counted(tokenizer, 2) as (each, _):
        assert each.lost == [0, 0]
        finished = await each.start(0, max_tokens=2)
        await wait_until(lambda: finished.num_open == 0)
        each.generator.abort(await each.start(0))
        await each.start(0, n=3)
        await each.start(0)
        kept = await each.start(1)
        each.generator.engine_lost(lost(0))
        assert each.lost == [4, 0]
        each.generator.engine_lost(lost(0))
        each.generator.abort(kept)
        each.generator.engine_lost(lost(1))
        assert each.lost == [4, 0]


@pytest.mark.asyncio
async def test_what_failed_with_the_connection_counts_when_the_engine_is_lost(tokenizer: Tokenizer) -> None:
    """While it may live, it may still count them itself."""
    async with counted(tokenizer) as (each, (far,)):
        await fail_with_connection(each, far)
        assert each.lost == [0]
        each.generator.engine_lost(lost(0))
        assert each.lost == [2]
        each.generator.engine_lost(lost(0))
        assert each.lost == [2]


@pytest.mark.asyncio
async def test_what_failed_with_the_connection_is_left_to_an_engine_that_lives(tokenizer: Tokenizer) -> None:
    """It aborts, and counts, what a client had open that greets it again."""
    async with counted(tokenizer) as (each, (far,)):
        await fail_with_connection(each, far)
        await each.generator.connect(far.ready())
        await wait_until(lambda: far.engine.num_running == 0)
        await each.start(0)
        each.generator.engine_lost(lost(0))
        assert each.lost == [1]


def errors(client: httpx.Client, engine: int) -> float:
    """As /metrics says."""
    labels = f'engine="{engine}",finished_reason="error",model_name="{MODEL_NAME}"'
    name = re.escape(f"tokenmill:request_success_total{{{labels}}} ")
    return sum(float(value) for value in re.findall(rf"(?m)^{name}(\S+)$", client.get("/metrics").text))


def open_calls(
    server: Server, pool: ThreadPoolExecutor, engine: EchoEngine, count: int
) -> list[Future[httpx.Response]]:
    """Requests of two sequences each that only the engine's end ends, each over a connection of its own."""
    body = {"model": MODEL_NAME, "prompt": "one two three", "max_tokens": 8000, "n": 2}

    def call() -> httpx.Response:
        with server.client() as client:
            return client.post("/v1/completions", json=body, headers={"X-data-parallel-rank": str(engine.engine)})

    before = engine.num_running
    calls = [pool.submit(call) for _ in range(count)]
    wait_for(lambda: engine.num_running == before + 2 * count, 60, "open requests")
    return calls


@pytest.mark.slow
def test_api_servers_count_together_and_over_restarts() -> None:
    with (
        run_server(2, api_server_count=2, engine_options={"step_s": 0.02}) as server,
        server.client() as client,
        ThreadPoolExecutor() as pool,
    ):
        for incarnation in range(2):
            engine = server.engines[1]
            calls = open_calls(server, pool, engine, 4)
            engine.stop()
            for child in server.children:
                child.channel.send(EngineLost(1, incarnation, "engine core 1 was killed", restarts=True))
            assert [call.result(60).status_code for call in calls] == [500] * 4
            assert errors(client, 1) == 8 * (incarnation + 1)
            again = EchoEngine(engine.run_dir, 1, incarnation=incarnation + 1, step_s=0.02).start()
            server.engines[1] = again
            for child in server.children:
                child.channel.send(EngineBack(again.ready()))
            wait_for(lambda: "engines" not in client.get("/health").json(), 60, "the engine")
        assert errors(client, 0) == 0
