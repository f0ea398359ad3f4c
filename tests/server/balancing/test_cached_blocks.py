from tokenmill_server.balancing import cached_blocks
from tokenmill_server.balancing.cached_blocks import CachedBlocks


def test_leading_blocks_count_up_to_the_first_that_is_not_there() -> None:
    blocks = CachedBlocks()
    blocks.store([1, 2, 4])
    assert blocks.count_leading([1, 2, 3, 4]) == 2
    assert blocks.count_leading([4, 1]) == 2
    assert blocks.count_leading([3, 1]) == 0
    assert blocks.count_leading([]) == 0


def test_expected_blocks_count_as_stored_ones() -> None:
    blocks = CachedBlocks()
    blocks.store([1])
    blocks.expect([1, 2, 3])
    assert blocks.count_leading([1, 2, 3, 4]) == 3
    assert len(blocks) == 1


def test_a_removed_block_is_not_expected_either() -> None:
    blocks = CachedBlocks()
    blocks.expect([1, 2])
    blocks.store([1])
    blocks.remove([1])
    assert blocks.count_leading([1, 2]) == 0


def test_a_snapshot_replaces_what_was_stored_and_leaves_what_is_on_its_way() -> None:
    blocks = CachedBlocks()
    blocks.store([1, 2])
    blocks.expect([5])
    blocks.replace([3])
    assert blocks.count_leading([1]) == 0
    assert blocks.count_leading([3, 5]) == 2


def test_expectations_do_not_grow_without_end() -> None:
    blocks = CachedBlocks()
    limit = cached_blocks._MAX_EXPECTED
    blocks.expect(range(limit))
    blocks.expect(range(limit, 2 * limit - 1))
    assert blocks.count_leading(range(2 * limit - 1)) == 2 * limit - 1
    blocks.expect([2 * limit])
    assert blocks.count_leading([0]) == 0
    assert blocks.count_leading([limit, 2 * limit]) == 2
