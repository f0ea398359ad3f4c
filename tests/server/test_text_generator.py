"""The engine client and the generator against an engine that speaks the real protocol."""

import asyncio
import gc
from collections.abc import Sequence

import pytest

from tests.support.echo_engine import POISON, echo_tokens, made_up_logprob
from tests.support.echo_generators import Recorder, generating, request, wait_until
from tokenmill_engine.config.model_files import embedded_model_path
from tokenmill_engine.errors import EngineDeadError, EngineError, EngineUnavailableError
from tokenmill_engine.ipc.control import EngineLost
from tokenmill_engine.messages import FinishReason, SamplingParams
from tokenmill_server.balancing.load_balancer import LoadBalancer
from tokenmill_server.engine_client import EngineClient
from tokenmill_server.processing.generation import GenerationRequest, TokenLogprob
from tokenmill_server.processing.output_processor import Choice
from tokenmill_server.processing.tokenizer import Tokenizer, load_tokenizer
from tokenmill_server.text_generator import TextGenerator

pytestmark = pytest.mark.asyncio


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(str(embedded_model_path()))


async def test_complete(tokenizer: Tokenizer) -> None:
    async with generating(tokenizer) as (generator, _):
        output = await generator.complete(request(tokenizer, "one two three", max_tokens=4))
        assert output.outputs[0].text == "one two threeone"
        assert output.outputs[0].token_ids == echo_tokens(list(output.prompt_token_ids), 4)
        assert output.outputs[0].finish_reason is FinishReason.LENGTH
        assert output.outputs[0].logprobs is None
        assert generator.num_open == 0


async def test_a_wake_up_is_between_two_calls_however_many_requests_it_served(tokenizer: Tokenizer) -> None:
    async with generating(tokenizer) as (generator, _):
        befores: list[int] = []
        calls: list[int] = []
        generator.around_outputs(lambda: befores.append(generator.num_open), lambda: calls.append(generator.num_open))
        requests = [request(tokenizer, f"word {index}", max_tokens=6) for index in range(30)]
        await generator.complete_all(requests)
        assert calls[-1] == 0  # after the last output, whose requests are over by then
        assert befores[0] == 30
        assert len(befores) == len(calls) < 30 * 6


@pytest.mark.parametrize("tokens_per_step", [1, 3])
async def test_many_at_once_over_two_engines(tokenizer: Tokenizer, tokens_per_step: int) -> None:
    async with generating(tokenizer, 2, tokens_per_step=tokens_per_step) as (generator, engines):
        texts = [f"word {index} and more" for index in range(30)]
        outputs = await generator.complete_all([request(tokenizer, text, max_tokens=20) for text in texts])
        for text, output in zip(texts, outputs, strict=True):
            assert output.outputs[0].token_ids == echo_tokens(tokenizer.encode(text), 20)
        assert [len(engine.added) for engine in engines] == [15, 15]


async def test_choices_of_a_seed_differ_and_repeat(tokenizer: Tokenizer) -> None:
    async with generating(tokenizer) as (generator, (engine,)):
        wanted = request(tokenizer, "one two three four five six", n=4, seed=7, temperature=1.0)
        first, second = [await generator.complete(wanted) for _ in range(2)]
        assert [one.text for one in first.outputs] == [one.text for one in second.outputs]
        assert len({one.text for one in first.outputs}) > 1
        assert [added.sampling.seed for added in engine.added[:4]] == [7, 8, 9, 10]
        assert all(added.sampling.n == 1 for added in engine.added)
        assert len({added.request_id for added in engine.added}) == 8


async def test_logprobs(tokenizer: Tokenizer) -> None:
    async with generating(tokenizer) as (generator, _):
        output = await generator.complete(request(tokenizer, "one two three", logprobs=2, prompt_logprobs=0))
        entries = output.outputs[0].logprobs
        assert entries is not None
        assert output.prompt_logprobs is not None
        assert "".join(entry.text for entry in entries) == output.outputs[0].text
        assert [entry.logprob for entry in entries] == [made_up_logprob(entry.token_id) for entry in entries]
        assert [len(entry.top) for entry in entries] == [2] * 8
        assert output.prompt_logprobs[0] is None
        assert [entry and entry.token_id for entry in output.prompt_logprobs[1:]] == tokenizer.encode("one two three")[
            1:
        ]


async def test_a_stop_string_frees_the_engine(tokenizer: Tokenizer) -> None:
    async with generating(tokenizer) as (generator, (engine,)):
        output = await generator.complete(request(tokenizer, "one two three", stop=(" three",), max_tokens=10**6))
        assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("one two", " three")
        await wait_until(lambda: engine.num_running == 0)
        assert [reason for _, reason in engine.aborted] == [FinishReason.STOP]


async def test_a_cancelled_caller_stops_all_choices(tokenizer: Tokenizer) -> None:
    async with generating(tokenizer) as (generator, (engine,)):
        task = asyncio.create_task(generator.complete(request(tokenizer, "one two", n=4, max_tokens=10**6)))
        await wait_until(lambda: engine.num_running == 4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_until(lambda: engine.num_running == 0)
        assert generator.num_open == 0
        assert [reason for _, reason in engine.aborted] == [FinishReason.ABORT] * 4


async def test_a_request_that_fails_in_the_engine_fails_alone(tokenizer: Tokenizer) -> None:
    async with generating(tokenizer) as (generator, _):
        poisoned = GenerationRequest("bad", [POISON, 504], SamplingParams(max_tokens=5), 0.0)
        good = asyncio.create_task(generator.complete(request(tokenizer, "one two three")))
        with pytest.raises(EngineError, match="not numbers"):
            await generator.complete(poisoned)
        assert (await good).outputs[0].text.startswith("one two three")


async def test_death_of_an_engine_fails_its_requests_at_once(tokenizer: Tokenizer) -> None:
    async with generating(tokenizer, 2) as (generator, engines):
        lost, kept = [
            asyncio.create_task(generator.complete(request(tokenizer, "one two", max_tokens=limit), engine))
            for engine, limit in ((0, 10**6), (1, 50))
        ]
        await wait_until(lambda: engines[0].num_running == 1)
        generator.engine_lost(EngineLost(0, 0, "engine core 0 was killed"))
        with pytest.raises(EngineDeadError, match="engine core 0 was killed"):
            await lost
        assert (await kept).outputs[0].finish_reason is FinishReason.LENGTH
        with pytest.raises(EngineUnavailableError, match="engine core 0 was killed"):
            await generator.complete(request(tokenizer, "one"), 0)


async def test_others_have_their_turn_while_very_many_are_started(tokenizer: Tokenizer) -> None:
    async with generating(tokenizer) as (generator, _):
        starting = asyncio.create_task(generator.complete_all([request(tokenizer, "one", max_tokens=10**6)] * 100))
        numbers = []
        while generator.num_open < 100:
            numbers.append(generator.num_open)
            await asyncio.sleep(0)
        assert numbers[-1] > numbers[1] > 0
        starting.cancel()
        await asyncio.wait([starting])
        assert generator.num_open == 0


async def test_an_engine_that_dies_while_very_many_are_started(tokenizer: Tokenizer) -> None:
    """Nothing stays open, and no failure that nobody has looked at."""
    overlooked: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: overlooked.append(context))
    async with generating(tokenizer) as (generator, _):
        starting = asyncio.create_task(generator.complete_all([request(tokenizer, "one", max_tokens=10**6)] * 100))
        while not generator.num_open:
            await asyncio.sleep(0)
        assert generator.num_open < 100
        generator.engine_lost(EngineLost(0, 0, "engine core 0 was killed"))
        with pytest.raises(EngineDeadError, match="engine core 0 was killed"):
            await starting
        assert generator.num_open == 0
    del starting
    gc.collect()
    assert overlooked == []


async def test_a_listener_that_raises_fails_its_request_alone(tokenizer: Tokenizer) -> None:
    class Broken(Recorder):
        def on_delta(
            self, choice: Choice, text: str, token_ids: Sequence[int], logprobs: list[TokenLogprob] | None
        ) -> None:
            raise RuntimeError("a bug")

    async with generating(tokenizer) as (generator, (engine,)):
        broken = Broken()
        generator.start(request(tokenizer, "one two", max_tokens=10**6), broken)
        output = await generator.complete(request(tokenizer, "one two three"))
        assert output.outputs[0].text.startswith("one two three")
        assert isinstance(broken.error, EngineError)
        await wait_until(lambda: engine.num_running == 0)


async def test_before_the_engines_are_connected(tokenizer: Tokenizer) -> None:
    generator = TextGenerator(EngineClient(0, 0, LoadBalancer(1)), tokenizer)
    with pytest.raises(EngineDeadError):
        await generator.complete(request(tokenizer, "one"))
    generator.disconnect()


async def test_an_engine_that_is_gone_before_anyone_said_so(tokenizer: Tokenizer) -> None:
    async with generating(tokenizer, 2) as (generator, engines):
        engines[0].stop()
        async with asyncio.timeout(60):
            while True:  # until the socket has noticed
                try:
                    generator.abort(generator.start(request(tokenizer, "one"), Recorder(), 0))
                except EngineDeadError:
                    break
                await asyncio.sleep(0.01)
        assert (await generator.complete(request(tokenizer, "one two"), 1)).outputs[0].text
        engines[0].start()
