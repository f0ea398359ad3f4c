"""Requests whose media an engine core turns out to lack: sent again, unless nobody wants them any more."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.support.echo_engine import EchoEngine, echo_tokens
from tests.support.echo_generators import Recorder, generating, request, wait_until
from tests.support.media_items import qwen_item
from tokenmill_engine.config.model_files import embedded_model_path
from tokenmill_engine.errors import EngineDeadError, EngineError, InvalidRequestError, TokenmillError
from tokenmill_engine.ipc.control import EngineLost
from tokenmill_engine.media_store import MediaStore
from tokenmill_engine.messages import MediaItem
from tokenmill_server.processing.generation import GenerationRequest
from tokenmill_server.processing.tokenizer import Tokenizer, load_tokenizer
from tokenmill_server.text_generator import TextGenerator

pytestmark = pytest.mark.asyncio


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(str(embedded_model_path()))


def items(*contents: str) -> tuple[MediaItem, ...]:
    return tuple(qwen_item(content, 4 * index) for index, content in enumerate(contents))


class Supply:
    """Believes that the engine has whatever it is told, unless it has nothing at hand."""

    def __init__(self, media: Sequence[MediaItem], believed: bool = True, at_hand: bool = True) -> None:
        self.media = tuple(media)
        self.believed, self.at_hand = believed, at_hand
        self.may_restore = asyncio.Event()
        self.may_restore.set()
        self.error: Exception | None = None
        self.num_restored = self.num_settled = self.num_cancelled = self.num_ended = 0

    @property
    def places(self) -> tuple[MediaItem, ...]:
        return tuple(msgspec.structs.replace(item, tensors={}) for item in self.media)

    def outgoing(self, shares: bool = False) -> tuple[MediaItem, ...] | None:
        if not self.at_hand:
            return None
        return self.places if self.believed else self.media

    async def restored(self) -> tuple[MediaItem, ...]:
        self.num_restored += 1
        try:
            await self.may_restore.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return self.media

    def settle(self) -> None:
        self.num_settled += 1

    def end(self) -> None:
        self.num_ended += 1


def asked(tokenizer: Tokenizer, supply: Supply, **sampling: Any) -> GenerationRequest:
    made = request(tokenizer, "The image shows something", **sampling)
    return replace(made, media=supply.places, media_supply=supply)


def stores(engines: Sequence[EchoEngine], capacity_bytes: int = 0) -> None:
    for engine in engines:
        engine.media = MediaStore(capacity_bytes)


def answer(asked: GenerationRequest) -> list[int]:
    return echo_tokens(list(asked.prompt_token_ids), 8)


def num_resent(generator: TextGenerator) -> int:
    """Choices that wait for media to be sent again."""
    return sum(len(resend.choices) for resend in generator._resender._resends.values())


async def test_the_client_notices_nothing(tokenizer: Tokenizer) -> None:
    async with generating(tokenizer) as (generator, engines):
        stores(engines, 1 << 20)
        supply = Supply(items("cat", "dog"))
        wanted = asked(tokenizer, supply)
        output = await generator.complete(wanted)
        assert output.outputs[0].token_ids == answer(wanted)
        assert (engines[0].num_missing, supply.num_restored, supply.num_settled) == (1, 1, 1)
        assert [added.media for added in engines[0].added] == [supply.media]
        again = await generator.complete(asked(tokenizer, supply))
        assert again.outputs[0].token_ids == answer(wanted)
        assert (engines[0].num_missing, supply.num_restored) == (1, 1)


@pytest.mark.parametrize("believed", [False, True])
async def test_of_several_choices_the_first_carries_the_tensors(tokenizer: Tokenizer, believed: bool) -> None:
    """The second time, too, and to whichever engine core they go."""
    async with generating(tokenizer, num_engines=2) as (generator, engines):
        stores(engines)
        for engine in range(2):
            supply = Supply(items("cat"), believed)
            echo = engines[engine]
            echo.paused.set()
            supply.may_restore.clear()
            wanted = asked(tokenizer, supply, n=4, temperature=1.0)
            task = asyncio.ensure_future(generator.complete(wanted, engine))
            if believed:  # the engine may say so of one after the other
                await wait_until(lambda: num_resent(generator) == 4)
            supply.may_restore.set()
            await wait_until(lambda echo=echo: len(echo.added) == 4)
            echo.paused.clear()
            assert len((await task).outputs) == 4
            assert supply.num_settled == 1
            assert [bool(added.media[0].tensors) for added in echo.added] == [True, False, False, False]
            assert echo.num_missing == (4 if believed else 0)
            assert echo.media is not None
            await wait_until(lambda echo=echo: len(echo.media) == 0)


async def test_what_is_not_at_hand_is_sent_once_it_is(tokenizer: Tokenizer) -> None:
    """All choices of the request, with nothing that the engine could lack."""
    async with generating(tokenizer) as (generator, engines):
        stores(engines, 1 << 20)
        supply = Supply(items("cat"), at_hand=False)
        supply.may_restore.clear()
        task = asyncio.ensure_future(generator.complete(asked(tokenizer, supply, n=3, temperature=1.0)))
        await wait_until(lambda: supply.num_restored == 1)
        other = await generator.complete(request(tokenizer, "another"))
        assert other.outputs[0].token_ids
        assert [added.media for added in engines[0].added] == [()]
        supply.may_restore.set()
        assert len((await task).outputs) == 3
        assert (supply.num_restored, supply.num_settled) == (1, 1)
        assert [bool(added.media[0].tensors) for added in engines[0].added[1:]] == [True, False, False]


async def test_what_is_not_at_hand_and_never_will_be_is_the_requests_error(tokenizer: Tokenizer) -> None:
    async with generating(tokenizer) as (generator, engines):
        stores(engines)
        supply = Supply(items("cat"), at_hand=False)
        supply.error = InvalidRequestError("send it along", "uuid")
        assert type(await ended(generator, supply, asked(tokenizer, supply))) is InvalidRequestError
        assert engines[0].added == []
        assert supply.num_ended > 0


async def test_choices_that_end_before_the_next_one_is_there(tokenizer: Tokenizer) -> None:
    """Their media go with them, so that each of the others comes twice. All are answered."""
    async with generating(tokenizer, step_s=0.0) as (generator, engines):
        stores(engines)
        for _ in range(10):
            supply = Supply(items("cat"), believed=False)
            output = await generator.complete(asked(tokenizer, supply, n=8, max_tokens=1))
            assert [len(each.token_ids) for each in output.outputs] == [1] * 8
            assert supply.num_settled == 1


async def ended(generator: TextGenerator, supply: Supply, wanted: GenerationRequest) -> TokenmillError | None:
    recorder = Recorder()
    generation = generator.start(wanted, recorder)
    await wait_until(lambda: generator.num_open == 0)
    generator.close_generation(generation)
    return recorder.error


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (InvalidRequestError("send it along", "uuid"), InvalidRequestError),
        (ValueError("a fault of ours"), EngineError),
    ],
)
async def test_what_cannot_be_had_any_more_is_the_requests_error(
    tokenizer: Tokenizer, raised: Exception, told: type[TokenmillError]
) -> None:
    async with generating(tokenizer) as (generator, engines):
        stores(engines)
        supply = Supply(items("cat"))
        supply.error = raised
        assert type(await ended(generator, supply, asked(tokenizer, supply, n=2))) is told
        fine = Supply(items("cat"), believed=False)
        assert (await generator.complete(asked(tokenizer, fine))).outputs[0].token_ids


async def test_a_request_without_a_supply_ends(tokenizer: Tokenizer) -> None:
    async with generating(tokenizer) as (generator, engines):
        stores(engines)
        supply = Supply(items("cat"))
        lost = replace(asked(tokenizer, supply), media_supply=None)
        assert type(await ended(generator, supply, lost)) is EngineError


@pytest.mark.parametrize("at_hand", [True, False])
async def test_an_abort_ends_the_work(tokenizer: Tokenizer, at_hand: bool) -> None:
    """Nothing is sent for those who have gone."""
    async with generating(tokenizer) as (generator, engines):
        stores(engines)
        supply = Supply(items("cat"), at_hand=at_hand)
        supply.may_restore.clear()
        task = asyncio.ensure_future(generator.complete(asked(tokenizer, supply)))
        await wait_until(lambda: supply.num_restored == 1)
        task.cancel()
        await asyncio.wait([task])
        await wait_until(lambda: supply.num_cancelled == 1)
        supply.may_restore.set()
        assert (await generator.complete(request(tokenizer, "another"))).outputs[0].token_ids
        assert [added.media for added in engines[0].added] == [()]
        assert generator.num_open == 0


@pytest.mark.parametrize("at_hand", [True, False])
async def test_the_engine_dies_meanwhile(tokenizer: Tokenizer, at_hand: bool) -> None:
    """The request ends with it; on the next one it begins anew."""
    async with generating(tokenizer) as (generator, engines):
        stores(engines)
        supply = Supply(items("cat"), at_hand=at_hand)
        supply.may_restore.clear()
        task = asyncio.ensure_future(generator.complete(asked(tokenizer, supply)))
        await wait_until(lambda: supply.num_restored == 1)
        generator.engine_lost(EngineLost(0, 0, "the engine is gone", restarts=True))
        with pytest.raises(EngineDeadError, match="the engine is gone"):
            await task
        supply.may_restore.set()
        await wait_until(lambda: supply.num_cancelled == 1)
        engines[0].stop()
        engines[0] = EchoEngine(engines[0].run_dir, 0, incarnation=1, media=MediaStore()).start()
        await generator.connect(engines[0].ready())
        wanted = asked(tokenizer, supply)
        assert (await generator.complete(wanted)).outputs[0].token_ids == answer(wanted)
        assert [added.media for added in engines[0].added] == [supply.media]


@pytest.mark.parametrize("at_hand", [True, False])
async def test_another_engine_core_than_the_lost_one_gets_all_tensors(tokenizer: Tokenizer, at_hand: bool) -> None:
    """Whether the lost one had been sent the request or waited for its media."""
    async with generating(tokenizer, num_engines=3) as (generator, engines):
        stores(engines, 1 << 20)
        supply = Supply(items("cat"), believed=False, at_hand=at_hand)
        if not at_hand:
            supply.may_restore.clear()
        engines[0].paused.set()
        wanted = asked(tokenizer, supply, n=2)
        waiting = asyncio.create_task(generator.complete(wanted))
        await wait_until(lambda: generator.num_open == 2 and len(engines[0].added) == (2 if at_hand else 0))
        generator.engine_lost(EngineLost(0, 0, "killed"))
        supply.may_restore.set()
        output = await waiting
        assert [choice.token_ids for choice in output.outputs] == [answer(wanted)] * 2
        assert [len(added.media[0].tensors) > 0 for added in engines[1].added] == [True, False]
        assert (engines[1].num_missing, supply.num_cancelled) == (0, 0 if at_hand else 1)
