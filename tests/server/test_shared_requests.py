"""Requests whose media are in shared memory: what travels to whom, and until when the memory is held."""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.echo_engine import EchoEngine
from tests.support.echo_generators import Recorder, generating, request, wait_until
from tests.support.prepared_items import made_up
from tests.support.shared_media import object_store, same
from tokenmill_engine.config.model_files import embedded_model_path
from tokenmill_engine.errors import EngineDeadError
from tokenmill_engine.ipc.control import EngineLost
from tokenmill_engine.ipc.object_store import ObjectStore
from tokenmill_engine.media_store import MediaStore
from tokenmill_engine.messages import Endpoints, EngineReady
from tokenmill_server.engine_news import log_sharing
from tokenmill_server.multimodal.items import PreparedItem
from tokenmill_server.multimodal.placement import CachePlacement, Placement
from tokenmill_server.multimodal.prepared import PreparedMedia
from tokenmill_server.multimodal.supply import LoadedItem, RequestSupply
from tokenmill_server.processing.generation import GenerationRequest
from tokenmill_server.processing.tokenizer import Tokenizer, load_tokenizer
from tokenmill_server.text_generator import TextGenerator

pytestmark = pytest.mark.asyncio

SIZE = 8000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(str(embedded_model_path()))


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    with object_store(4) as opened:
        yield opened


def asked(tokenizer: Tokenizer, store: ObjectStore, *numbers: int, **sampling: int) -> GenerationRequest:
    """Whose images were just prepared; of 8000 bytes each, so that two fit."""
    prepared = PreparedMedia(CachePlacement(Placement.SHARED, 1 << 20, 1), store=store)
    items: list[PreparedItem] = [made_up(number, SIZE) for number in numbers]
    assert prepared._cache is not None
    for item in items:
        prepared._cache.keep(item)
    places = [item.at(9 * index) for index, item in enumerate(items)]
    supply = RequestSupply(prepared, [LoadedItem(item, "", None) for item in items], places)
    made = request(tokenizer, "The image shows something", **sampling)
    return replace(made, media=supply.places, media_supply=supply)


async def complete_together(generator: TextGenerator, engine: EchoEngine, wanted: GenerationRequest) -> None:
    """No choice ends before all are there."""
    engine.paused.set()
    task = asyncio.ensure_future(generator.complete(wanted))
    await wait_until(lambda: engine.num_running == wanted.sampling.n)
    engine.paused.clear()
    await task


async def test_every_choice_says_where_the_bytes_are(tokenizer: Tokenizer, store: ObjectStore) -> None:
    async with generating(tokenizer, num_segments=1) as (generator, engines):
        await generator.complete(asked(tokenizer, store, 1, 2, n=3, temperature=1))
        assert len(engines[0].added) == 3
        for added in engines[0].added:
            for item, number in zip(added.media, (1, 2), strict=True):
                assert item.shared is not None
                assert not any(len(tensor.data) for tensor in item.tensors.values())
                assert same(store.reader.read(item.shared, item.key, item.tensors), made_up(number, SIZE).tensors)
        assert store.num_leased == 0


async def test_what_has_no_room_travels_with_the_first_choice(tokenizer: Tokenizer, store: ObjectStore) -> None:
    async with generating(tokenizer, num_segments=1) as (generator, engines):
        engines[0].media = MediaStore()
        held = [store.put(item.key, item.tensors) for item in (made_up(1, SIZE), made_up(2, SIZE))]
        await complete_together(generator, engines[0], asked(tokenizer, store, 3, 1, n=2, temperature=1))
        first, second = (added.media for added in engines[0].added)
        assert same(first[0].tensors, made_up(3, SIZE).tensors)
        assert second[0].tensors == {}
        assert first[0].shared is second[0].shared is None
        assert first[1] == second[1]
        assert first[1].shared is not None
        assert None not in held


async def test_an_engine_without_this_memory_gets_everything(tokenizer: Tokenizer, store: ObjectStore) -> None:
    async with generating(tokenizer) as (generator, engines):
        engines[0].media = MediaStore()
        await complete_together(generator, engines[0], asked(tokenizer, store, 1, n=2, temperature=1))
        first, second = (added.media for added in engines[0].added)
        assert same(first[0].tensors, made_up(1, SIZE).tensors)
        assert (second[0].tensors, first[0].shared, second[0].shared) == ({}, None, None)
        assert store.num_leased == 0


@pytest.mark.parametrize("end", ["answered", "aborted", "lost"])
async def test_memory_is_held_until_the_request_ends(tokenizer: Tokenizer, store: ObjectStore, end: str) -> None:
    async with generating(tokenizer, num_segments=1) as (generator, engines):
        engines[0].paused.set()
        generation = generator.start(asked(tokenizer, store, 1), Recorder())
        await wait_until(lambda: engines[0].num_running == 1)
        assert store.num_leased == 1
        match end:
            case "answered":
                engines[0].paused.clear()
                await wait_until(lambda: generator.num_open == 0)
            case "lost":
                generator.engine_lost(EngineLost(0, 0, "gone"))
        generator.close_generation(generation)
        assert store.num_leased == 0


async def test_nothing_is_held_for_a_request_that_cannot_be_sent(
    tokenizer: Tokenizer, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with generating(tokenizer, num_segments=1) as (generator, _):
        monkeypatch.setattr(generator._client, "_send", lambda engine, message: False)
        with pytest.raises(EngineDeadError):
            generator.start(asked(tokenizer, store, 1), Recorder())
        assert store.num_leased == 0


async def test_of_a_request_that_is_cancelled_nothing_stays(tokenizer: Tokenizer, store: ObjectStore) -> None:
    async with generating(tokenizer, num_segments=1) as (generator, engines):
        engines[0].paused.set()
        task = asyncio.ensure_future(generator.complete(asked(tokenizer, store, 1, 2)))
        await wait_until(lambda: engines[0].num_running == 1)
        assert store.num_leased == 2
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert store.num_leased == 0


async def test_the_log_names_engine_cores_that_share_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def ready(num_segments: int) -> EngineReady:
        return EngineReady(0, 0, Endpoints("in", "out"), 128, 8, 16, 128, "none", num_segments=num_segments)

    with caplog.at_level(logging.WARNING):
        log_sharing(ready(2), 5, expected=True)
        log_sharing(ready(0), 6, expected=False)
        assert caplog.records == []
        log_sharing(ready(0), 7, expected=True)
    assert [record.getMessage().partition(" shares")[0] for record in caplog.records] == [
        "engine core 7 is on another machine and"
    ]
