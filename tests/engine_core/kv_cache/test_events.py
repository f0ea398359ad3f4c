"""The journal of names that came and went."""

from tokenmill_engine.block_hash import BlockHash
from tokenmill_engine.kv_cache.block_pool import BlockPool
from tokenmill_engine.kv_cache.events import BlockJournal


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def test_it_tells_what_changed_since_it_was_asked_last() -> None:
    journal = BlockJournal()
    journal.store(name(1))
    journal.store(name(2))
    assert not journal.is_empty
    assert journal.take() == ({name(1), name(2)}, set())
    assert journal.is_empty
    journal.remove(name(1))
    assert journal.take() == (set(), {name(1)})
    assert journal.take() == (set(), set())


def test_what_came_and_went_in_between_is_not_told() -> None:
    journal = BlockJournal()
    journal.store(name(1))
    journal.take()
    journal.remove(name(1))
    journal.store(name(2))
    journal.store(name(1))
    journal.remove(name(2))
    assert journal.is_empty


def test_a_pool_enters_the_names_of_its_first_group_alone() -> None:
    journal = BlockJournal()
    pool = BlockPool(3, journal)
    first, second, other = pool.allocate(3)
    pool.publish(first, 0, name(1))
    pool.publish(second, 0, name(1))
    pool.publish(other, 1, name(2))
    assert pool.names(0) == [name(1)]
    assert journal.take() == ({name(1)}, set())
    pool.release([first, second, other])
    pool.allocate(3)
    assert pool.names(0) == []
    assert journal.take() == (set(), {name(1)})
