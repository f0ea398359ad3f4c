"""Requests of which nothing has come back when their engine core is lost: where two are left, another answers them."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tests.support.echo_engine import EchoEngine, echo_tokens
from tests.support.echo_generators import generating, request, wait_until
from tokenmill_engine.config.model_files import embedded_model_path
from tokenmill_engine.errors import EngineDeadError
from tokenmill_engine.ipc.control import EngineDraining, EngineLost, EngineStalled
from tokenmill_server.processing.collector import Collector, all_done
from tokenmill_server.processing.output_processor import Generation
from tokenmill_server.processing.tokenizer import Tokenizer, load_tokenizer
from tokenmill_server.text_generator import TextGenerator

pytestmark = pytest.mark.asyncio


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(str(embedded_model_path()))


class Started:
    """A generation of 8 tokens, which an engine core has received."""

    def __init__(self, generation: Generation, collector: Collector, tokenizer: Tokenizer) -> None:
        self.generation, self._collector, self._tokenizer = generation, collector, tokenizer

    async def is_answered(self) -> bool:
        """Raises EngineDeadError if it failed instead."""
        async with asyncio.timeout(20.0):
            await all_done([self._collector])
        output = self._collector.result(self.generation)
        expected = echo_tokens(list(output.prompt_token_ids), 8)
        return all(choice.token_ids == expected for choice in output.outputs)


class Cluster:
    """Engine cores that begin nothing until they are told to."""

    def __init__(self, generator: TextGenerator, engines: list[EchoEngine], tokenizer: Tokenizer) -> None:
        self.generator, self.engines, self._tokenizer = generator, engines, tokenizer

    async def start(self, pinned: int | None = None, n: int = 1, deadline: float | None = None) -> Started:
        before = sum(len(engine.added) for engine in self.engines)
        collector = Collector()
        wanted = replace(request(self._tokenizer, "one two three", n=n), deadline=deadline)
        generation = self.generator.start(wanted, collector, pinned)
        await wait_until(lambda: sum(len(engine.added) for engine in self.engines) == before + n)
        return Started(generation, collector, self._tokenizer)

    def lose(self, engine: int) -> None:
        self.engines[engine].paused.set()
        self.generator.engine_lost(EngineLost(engine, 0, f"engine core {engine} was killed"))

    def go_on(self, engine: int) -> None:
        self.engines[engine].paused.clear()


@asynccontextmanager
async def cluster(tokenizer: Tokenizer, num_engines: int = 3) -> AsyncIterator[Cluster]:
    async with generating(tokenizer, num_engines) as (generator, engines):
        for engine in engines:
            engine.paused.set()
        yield Cluster(generator, engines, tokenizer)


async def failure(started: Started) -> str:
    with pytest.raises(EngineDeadError) as caught:
        await started.is_answered()
    return caught.value.message


@pytest.mark.parametrize("n", [1, 3])
async def test_another_one_answers(tokenizer: Tokenizer, n: int) -> None:
    """All of several, and each once."""
    async with cluster(tokenizer) as each:
        started = [await each.start(n=n) for _ in range(6)]
        of_lost = [one for one in started if one.generation.engine == 0]
        assert len(of_lost) == 2
        each.lose(0)
        each.go_on(1)
        each.go_on(2)
        assert all([await one.is_answered() for one in started])
        assert {one.generation.engine for one in started} == {1, 2}
        added = [added.request_id for engine in each.engines[1:] for added in engine.added]
        assert len(set(added)) == len(added) == 6 * n
        assert each.generator.num_open == 0


async def test_what_has_begun_ends(tokenizer: Tokenizer) -> None:
    """Even if only one of its choices has."""
    async with cluster(tokenizer) as each:
        started = await each.start(n=2)
        engine = started.generation.engine
        assert not started.generation.has_begun
        started.generation.choices[0].push([504], None, None)
        started.generation.answered()
        assert started.generation.has_begun
        each.lose(engine)
        assert await failure(started) == f"engine core {engine} was killed"
        assert sum(len(engine.added) for engine in each.engines) == 2


async def test_tokens_that_were_under_way_count(tokenizer: Tokenizer) -> None:
    """What the engine core had sent before its end is read first."""
    async with cluster(tokenizer) as each:
        started = await each.start()
        lost = each.engines[started.generation.engine]
        lost.step_s = 1.0
        lost.paused.clear()
        # Blocking, for the event loop must not see the token before the loss.
        while not any(sequence.num_output for sequence in [*lost._running.values()]):
            time.sleep(0.01)
        time.sleep(0.3)
        each.generator.engine_lost(EngineLost(lost.engine, 0, "killed"))
        assert await failure(started) == "killed"


async def test_only_once(tokenizer: Tokenizer) -> None:
    """It may be what ends them."""
    async with cluster(tokenizer, 4) as each:
        started = await each.start()
        first = started.generation.engine
        each.lose(first)
        second = started.generation.engine
        assert second != first
        each.lose(second)
        assert await failure(started) == f"engine core {second} was killed"


async def test_not_if_the_client_named_the_engine_core(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer) as each:
        pinned = await each.start(pinned=1)
        each.lose(1)
        assert await failure(pinned) == "engine core 1 was killed"


async def test_not_after_the_deadline(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer) as each:
        started = await each.start(deadline=time.monotonic() + 0.2)
        time.sleep(0.3)  # its timer waits as well
        each.lose(started.generation.engine)
        assert "was killed" in await failure(started)


@pytest.mark.parametrize("num_engines", [1, 2])
async def test_not_where_fewer_than_two_others_are_left(tokenizer: Tokenizer, num_engines: int) -> None:
    """What ends whoever computes it must leave somebody to the others."""
    async with cluster(tokenizer, num_engines) as each:
        started = await each.start()
        engine = started.generation.engine
        each.lose(engine)
        assert await failure(started) == f"engine core {engine} was killed"
        assert sum(len(engine.added) for engine in each.engines) == 1


@pytest.mark.parametrize(
    "out", [EngineDraining(1, 0, "it ends"), EngineStalled(1, 0, 0.0), EngineLost(1, 0, "it is gone")]
)
async def test_others_that_take_nothing_new_do_not_count(
    tokenizer: Tokenizer, out: EngineDraining | EngineStalled | EngineLost
) -> None:
    async with cluster(tokenizer) as each:
        started = await each.start()
        assert started.generation.engine == 0
        if isinstance(out, EngineDraining):
            each.generator.engine_drains(out, lambda: None)
        elif isinstance(out, EngineStalled):
            each.generator.engine_stalls(out)
        else:
            each.generator.engine_lost(out)
        each.lose(0)
        assert await failure(started) == "engine core 0 was killed"
