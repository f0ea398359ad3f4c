"""Prepared media in shared memory, as an API server sees them: found by key, held while their request is open."""

import gc
import os
import threading
from collections.abc import Iterator

import pytest

from tests.support.prepared_items import made_up
from tests.support.shared_media import object_store, same, segment
from tokenmill_engine.ipc.arena import GRAIN_BYTES
from tokenmill_engine.ipc.object_store import Lease, ObjectStore
from tokenmill_engine.messages import MediaTensor
from tokenmill_server.multimodal.items import PreparedItem
from tokenmill_server.multimodal.placement import CachePlacement, Placement
from tokenmill_server.multimodal.prepared import PreparedMedia
from tokenmill_server.multimodal.shared_cache import SharedCache
from tokenmill_server.multimodal.supply import LoadedItem, RequestSupply

SIZE = 2 * GRAIN_BYTES - 100
"""Bytes of items of which three fit."""


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    with object_store(6) as opened:
        yield opened


def kept(cache: SharedCache, number: int, size: int = SIZE) -> PreparedItem:
    """As whoever prepared it has it."""
    item = made_up(number, size)
    cache.keep(item)
    cache.add(item)
    return item


def test_what_is_known_has_no_tensors_and_is_sent_with_a_place_for_them(store: ObjectStore) -> None:
    cache = SharedCache(store)
    prepared = kept(cache, 1)
    found = cache.find(prepared.key)
    assert found == prepared.without_tensors()
    for item in (prepared, found):
        sent = cache.outgoing(item, True)
        assert sent.lease is not None
        assert [(each.dtype, each.shape, each.data) for each in sent.tensors.values()] == [("uint8", (SIZE,), b"")]
        assert same(store.reader.read(sent.lease.shared, sent.key, sent.tensors), prepared.tensors)


def test_for_a_receiver_without_the_memory_tensors_that_are_there_alone_are_held_and_not_copied(
    store: ObjectStore,
) -> None:
    cache = SharedCache(store)
    prepared = kept(cache, 1)
    assert cache.outgoing(prepared, False) is prepared
    assert store.num_leased == 0
    found = cache.find(prepared.key)
    assert found is not None
    sent = cache.outgoing(found, False)
    assert sent.tensors == {}
    assert sent.lease is not None
    assert store.num_leased == 1


def test_tensors_are_in_reach_as_long_as_they_are_kept(store: ObjectStore) -> None:
    cache = SharedCache(store)
    prepared = kept(cache, 1)
    key, expected = prepared.key, prepared.tensors
    del prepared
    gc.collect()
    found = cache.with_tensors(key)
    assert found is not None
    assert same(found.tensors, expected)
    assert store.num_leased == 0
    store.clear()
    assert cache.with_tensors(key) is None


def test_what_finds_no_room_is_known_while_somebody_has_it(store: ObjectStore) -> None:
    cache = SharedCache(store)
    large = kept(cache, 1, 6 * GRAIN_BYTES)
    assert cache.find(large.key) is large
    assert cache.outgoing(large, True) is large
    key = large.key
    del large
    gc.collect()
    assert cache.find(key) is None


def test_what_went_in_between_is_sent_as_a_key(store: ObjectStore) -> None:
    """The engine core will miss it."""
    cache = SharedCache(store)
    key = kept(cache, 1).key
    found = cache.find(key)
    for number in range(2, 5):
        kept(cache, number)
    assert found is not None
    assert cache.outgoing(found, True) is found
    assert found.tensors == {}
    assert cache.find(key) is None


def test_who_finds_it_keeps_it_longest(store: ObjectStore) -> None:
    cache = SharedCache(store)
    keys = [kept(cache, number).key for number in range(3)]
    gc.collect()
    assert cache.find(keys[0]) is not None
    kept(cache, 3)
    assert [cache.find(key) is not None for key in keys] == [True, False, True]


def test_the_death_of_an_engine_core_changes_nothing(store: ObjectStore) -> None:
    cache = SharedCache(store)
    key = kept(cache, 1).key
    cache.clear()
    assert cache.find(key) is not None


def supply_of(store: ObjectStore, *numbers: int) -> RequestSupply:
    """Of a request whose items were just prepared."""
    prepared = PreparedMedia(CachePlacement(Placement.SHARED, 1 << 20, 1), store=store)
    cache = prepared._cache
    assert isinstance(cache, SharedCache)
    loaded = [LoadedItem(kept(cache, number), "", None) for number in numbers]
    return RequestSupply(prepared, loaded, [each.item.at(9 * index) for index, each in enumerate(loaded)])


def test_a_request_holds_its_media_until_it_ends(store: ObjectStore) -> None:
    """Not only until it has had an answer: its prompt may have to be computed again. One that is there twice is held
    twice, and one that has no room travels along."""
    supply = supply_of(store, 1, 2, 1)
    travelling = supply.outgoing(True)
    assert travelling is not None
    assert [item.shared is not None for item in travelling] == [True] * 3
    assert travelling[0].shared == travelling[2].shared
    assert [item.offset for item in travelling] == [0, 9, 18]
    assert store.num_leased == 2
    supply.settle()
    assert store.num_leased == 2
    crowded = supply_of(store, 3, 4)
    # The second one took the place of the first.
    sent = crowded.outgoing(True)
    assert sent is not None
    assert [item.shared is not None for item in sent] == [False, True]
    assert [len(item.tensors["pixel_values"].data) for item in sent] == [SIZE, 0]
    supply.end()
    supply.end()
    assert store.num_leased == 1
    crowded.end()
    assert store.num_leased == 0


def test_to_a_receiver_without_the_memory_an_item_travels_once(store: ObjectStore) -> None:
    supply = supply_of(store, 1, 1)
    travelling = supply.outgoing(False)
    assert travelling is not None
    assert [(bool(item.tensors), item.shared) for item in travelling] == [(True, None), (False, None)]
    assert store.num_leased == 0


@pytest.mark.asyncio
async def test_what_has_to_be_read_for_such_a_receiver_is_read_beside_the_event_loop(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is held until then, and travels once; so does what is at hand. Nobody prepares anything again."""
    supply = supply_of(store, 1, 2, 1)
    supply._loaded[0] = supply._loaded[2] = LoadedItem(supply._loaded[0].item.without_tensors(), "", None)
    threads: list[threading.Thread] = []
    read = Lease.read

    def watched(lease: Lease) -> dict[str, MediaTensor] | None:
        threads.append(threading.current_thread())
        return read(lease)

    monkeypatch.setattr(Lease, "read", watched)
    assert supply.outgoing(False) is None
    gc.collect()
    store.clear()
    assert store.num_objects == 1
    travelling = await supply.restored()
    assert [item.shared for item in travelling] == [None] * 3
    assert same(travelling[0].tensors, made_up(1, SIZE).tensors)
    assert same(travelling[1].tensors, made_up(2, SIZE).tensors)
    assert travelling[2].tensors == {}
    assert len(threads) == 1
    assert threading.current_thread() not in threads
    assert all(loaded.item.tensors == {} for loaded in supply._loaded)
    assert store.num_leased == 0
    supply.end()


def test_a_store_outlives_the_number_of_its_descriptor() -> None:
    """Who closes it may get the number for another file, in which nothing must be written."""
    with segment(6) as memory:
        store = ObjectStore(memory, 0, 1 << 30)
    other = os.memfd_create("other")
    try:
        cache = SharedCache(store)
        sent = cache.outgoing(kept(cache, 1).without_tensors(), False)
        found = cache.with_tensors(sent.key)
        assert found is not None
        assert same(found.tensors, made_up(1, SIZE).tensors)
        assert os.fstat(other).st_size == 0
    finally:
        os.close(other)
