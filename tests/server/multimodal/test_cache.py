"""What an API server remembers of prepared media, and that it is never too much."""

import gc
import logging
import random
import tracemalloc

import msgspec
import pytest

from tests.support.prepared_items import MADE_UP_BYTES, made_up
from tokenmill_engine.media_store import ITEM_OVERHEAD_BYTES, MediaStore
from tokenmill_engine.messages import MediaItem
from tokenmill_server.multimodal.cache import ItemCache, KeyCache
from tokenmill_server.multimodal.names import NAME_BYTES, MediaNames


def known(cache: ItemCache | KeyCache, *numbers: int) -> list[bool]:
    return [cache.find(made_up(number).key) is not None for number in numbers]


def test_items_with_tensors() -> None:
    cache = ItemCache(3 * MADE_UP_BYTES)
    for number in range(3):
        cache.add(made_up(number))
    assert cache.find(made_up(0).key) == made_up(0)
    cache.add(made_up(3))
    assert known(cache, 0, 1, 2, 3) == [True, False, True, True]
    assert cache.num_bytes == 3 * MADE_UP_BYTES
    assert cache.outgoing(made_up(0)) == made_up(0)
    cache.clear()
    assert known(cache, 0, 2, 3) == [True, True, True]


def test_keys_are_known_once_their_tensors_are_on_their_way() -> None:
    cache = KeyCache(3 * MADE_UP_BYTES)
    prepared = made_up(1)
    cache.add(prepared)
    assert cache.find(prepared.key) is prepared
    assert cache.num_bytes == 0
    assert cache.outgoing(prepared) is prepared
    assert cache.find(prepared.key) == prepared.without_tensors()
    assert cache.outgoing(made_up(1)) == cache.outgoing(made_up(1).without_tensors()) == prepared.without_tensors()
    assert cache.num_bytes == MADE_UP_BYTES
    del prepared
    assert known(cache, 1) == [True]
    cache.clear()
    assert known(cache, 1) == [False]
    assert cache.outgoing(made_up(1)) == made_up(1)


def test_what_was_never_sent_is_gone_with_the_last_who_had_it() -> None:
    """A refused request leaves nothing behind that others would take for sent."""
    cache = KeyCache(3 * MADE_UP_BYTES)
    prepared = made_up(1)
    cache.add(prepared)
    assert known(cache, 1) == [True]
    del prepared
    assert known(cache, 1) == [False]
    forgotten = made_up(2).without_tensors()
    assert cache.outgoing(forgotten) == forgotten
    assert (known(cache, 2), cache.num_bytes) == ([False], 0)


@pytest.mark.parametrize("kind", [ItemCache, KeyCache])
def test_one_that_is_larger_than_the_cache_is_not_kept(
    kind: type[ItemCache] | type[KeyCache], caplog: pytest.LogCaptureFixture
) -> None:
    cache = kind(3 * MADE_UP_BYTES)
    cache.add(made_up(1))
    cache.outgoing(made_up(1))
    with caplog.at_level(logging.WARNING):
        for number in (2, 3):
            cache.add(made_up(number, 4 * MADE_UP_BYTES))
            assert cache.outgoing(made_up(number, 4 * MADE_UP_BYTES)).tensors
    assert known(cache, 1, 2, 3) == [True, False, False]
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "a prepared image of 0.0 MB is larger than the whole cache"
    ]


@pytest.mark.parametrize("kind", [ItemCache, KeyCache])
@pytest.mark.parametrize("seed", range(5))
def test_it_never_takes_more_than_it_may(kind: type[ItemCache] | type[KeyCache], seed: int) -> None:
    rng = random.Random(seed)
    capacity = rng.randrange(1, 40_000)
    cache = kind(capacity)
    for _ in range(500):
        one = made_up(rng.randrange(30), 100 * rng.randrange(100))
        cache.add(one)
        cache.outgoing(one)
        cache.find(made_up(rng.randrange(30)).key)
        assert cache.num_bytes <= capacity


@pytest.mark.parametrize("kind", [ItemCache, KeyCache])
def test_what_is_counted_beside_tensors_is_enough(kind: type[ItemCache] | type[KeyCache]) -> None:
    """Measured, of entries here and in the engine core together, with tensors of hardly any bytes."""
    count = 3000
    cache, store = kind(1 << 30), MediaStore(1 << 30)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(count):
            one = msgspec.msgpack.decode(msgspec.msgpack.encode(made_up(number, 1).at(0)), type=MediaItem)
            cache.add(made_up(number, 1))
            cache.outgoing(made_up(number, 1))
            store.hold(number, (one,))
            store.release(number)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(store) == count
    assert after - before <= count * ITEM_OVERHEAD_BYTES
    assert cache.num_bytes == store.num_bytes == count * (ITEM_OVERHEAD_BYTES + 1)


def test_what_is_counted_for_names_is_enough() -> None:
    count = 3000
    names = MediaNames(1 << 30)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(count):
            names.remember(number.to_bytes(32, "big"), number.to_bytes(32, "little"))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before <= count * NAME_BYTES
