"""Block pool: order of reuse, references, names; and a model test against a naive pool."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tokenmill_engine.block_hash import BlockHash
from tokenmill_engine.kv_cache.block_pool import BlockPool


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def test_fresh_blocks_are_handed_out_in_order_and_usage_follows() -> None:
    pool = BlockPool(4)
    assert pool.usage == 0.0
    assert pool.allocate(3) == [0, 1, 2]
    assert (pool.num_free, pool.usage) == (1, 0.75)
    pool.check_invariants()


def test_asking_for_too_many_blocks_changes_nothing() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(ValueError, match="2 blocks asked for, 1 are free"):
        pool.allocate(2)
    assert pool.free_ids() == [1]
    pool.check_invariants()


def test_blocks_without_content_are_reused_before_cached_ones_and_those_by_age() -> None:
    pool = BlockPool(5)
    old, new, plain = pool.allocate(2), pool.allocate(2), pool.allocate(1)
    for block_id in (*old, *new):
        pool.publish(block_id, 0, name(block_id))
    pool.release(old)
    pool.release(new)
    pool.release(plain)
    # Of each table the end goes first: more prompts share its beginning.
    assert pool.free_ids() == [*plain, *reversed(old), *reversed(new)]


def test_a_found_block_is_taken_off_the_free_list_and_goes_back_behind_the_others() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block_id in blocks:
        pool.publish(block_id, 0, name(block_id))
        pool.release([block_id])
    found = pool.find(0, name(0))
    assert found == 0
    pool.acquire([found])
    assert pool.free_ids() == [1, 2]
    pool.release([found])
    assert pool.free_ids() == [1, 2, 0]


def test_handing_a_block_out_again_forgets_its_content() -> None:
    pool = BlockPool(1)
    pool.publish(pool.allocate(1)[0], 0, name(1))
    pool.release([0])
    assert pool.find(0, name(1)) == 0
    pool.allocate(1)
    assert pool.find(0, name(1)) is None
    pool.check_invariants()


def test_equal_content_keeps_its_first_block_and_groups_are_apart() -> None:
    pool = BlockPool(3)
    first, second, other = pool.allocate(3)
    pool.publish(first, 0, name(1))
    pool.publish(second, 0, name(1))
    pool.publish(other, 1, name(1))
    assert pool.find(0, name(1)) == first
    assert pool.find(1, name(1)) == other
    assert pool.find(2, name(1)) is None


class PoolMachine(RuleBasedStateMachine):
    """Random use by many tables, compared with plain counting."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.tables: list[list[int]] = []
        self.next_name = 0

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_free:
            self.tables.append(self.pool.allocate(count))
        else:
            with pytest.raises(ValueError, match="asked for"):
                self.pool.allocate(count)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from([table for table in self.tables if table]))
        self.next_name += 1
        self.pool.publish(data.draw(st.sampled_from(table)), 0, name(self.next_name))

    @precondition(lambda self: self.next_name)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        found = self.pool.find(0, name(data.draw(st.integers(1, self.next_name))))
        if found is not None:
            self.pool.acquire([found])
            self.tables.append([found])

    @invariant()
    def counts_match(self) -> None:
        self.pool.check_invariants()
        held = Counter(block_id for table in self.tables for block_id in table)
        assert all(self.pool.references(block_id) == held[block_id] for block_id in range(9))
        assert self.pool.usage == pytest.approx(len(held) / 9)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=50, deadline=None)
