"""Block tables per group, prefix reuse, and the questions the scheduler asks before it decides."""

import numpy as np
import pytest

from tokenmill_engine.block_hash import BlockHash, CacheKey, hash_full_blocks
from tokenmill_engine.kv_cache.manager import KVCacheManager

BLOCK = 4
TOKENS = np.arange(100, dtype=np.int32)


def hashes(num_tokens: int) -> list[BlockHash]:
    return hash_full_blocks(TOKENS[:num_tokens], BLOCK, CacheKey())


def run_request(manager: KVCacheManager, request_id: int, num_tokens: int) -> None:
    """Hold blocks for `num_tokens` tokens, all computed."""
    manager.start(request_id, manager.find_cached(hashes(num_tokens), num_tokens - 1))
    manager.grow(request_id, num_tokens)
    manager.publish(request_id, hashes(num_tokens), num_tokens // BLOCK)


@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_every_group_has_a_table_of_its_own_blocks(num_groups: int) -> None:
    manager = KVCacheManager(12, BLOCK, num_groups)
    run_request(manager, 1, 5)
    tables = manager.block_ids(1)
    assert [len(table) for table in tables] == [2] * num_groups
    assert len({block_id for table in tables for block_id in table}) == 2 * num_groups
    assert manager.num_blocks(5) == 2 * num_groups
    assert manager.max_tokens == 12 // num_groups * BLOCK
    manager.check_invariants()


@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_released_prefix_is_found_and_shared(num_groups: int) -> None:
    manager = KVCacheManager(16, BLOCK, num_groups)
    run_request(manager, 1, 11)
    first = [list(table) for table in manager.block_ids(1)]
    manager.release(1)
    assert manager.pool.usage == 0.0
    cached = manager.find_cached(hashes(11), 100)
    assert cached.num_tokens == 8
    assert [list(table) for table in cached.block_ids] == [table[:2] for table in first]
    run_request(manager, 2, 11)
    run_request(manager, 3, 9)
    shared = manager.block_ids(2)[0][0]
    assert manager.pool.references(shared) == 2
    manager.check_invariants()


def test_a_prefix_is_cut_to_the_tokens_asked_for() -> None:
    manager = KVCacheManager(16, BLOCK)
    run_request(manager, 1, 8)
    assert [manager.find_cached(hashes(8), limit).num_tokens for limit in (8, 7, 4, 3, 0)] == [8, 4, 4, 0, 0]


def test_a_prefix_ends_at_the_first_block_that_is_missing_in_any_group() -> None:
    manager = KVCacheManager(6, BLOCK, num_groups=2)
    run_request(manager, 1, 12)
    manager.release(1)
    # The end of the last group's table is reused first; the first group's blocks are all there still.
    manager.pool.allocate(1)
    assert manager.find_cached(hashes(12), 100).num_tokens == 8


def test_grow_returns_only_the_new_blocks() -> None:
    manager = KVCacheManager(8, BLOCK, num_groups=2)
    manager.start(1, manager.find_cached((), 0))
    assert [len(table) for table in manager.grow(1, 5)] == [2, 2]
    assert [len(table) for table in manager.grow(1, 8)] == [0, 0]
    new = manager.grow(1, 9)
    assert [table[2:] for table in manager.block_ids(1)] == list(new)


def test_counting_what_would_be_freed_knows_shared_blocks() -> None:
    manager = KVCacheManager(16, BLOCK)
    run_request(manager, 1, 9)
    run_request(manager, 2, 9)
    assert manager.count_freed([1]) == 1
    assert manager.count_freed([1, 2]) == 4
    assert manager.count_freed([]) == 0
    free = manager.pool.num_free
    manager.release(1)
    assert manager.pool.num_free == free + 1


def test_a_request_has_one_table() -> None:
    manager = KVCacheManager(4, BLOCK)
    run_request(manager, 1, 4)
    with pytest.raises(ValueError, match="has a block table already"):
        manager.start(1, manager.find_cached((), 0))
