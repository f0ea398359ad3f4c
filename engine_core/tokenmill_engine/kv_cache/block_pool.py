"""Ownership of fixed-size KV blocks: reference counts, the free list, and names of cached content.

A block with references belongs to requests. One without is free, and may still hold named content: it can be taken
back by name until it is handed out for something else. The free list is intrusive and doubly linked, so every
operation costs O(1) per block. It is ordered by next reuse: blocks without content first, then named ones, least
recently used first. Knows nothing of requests or tokens.
"""

from collections.abc import Iterable, Sequence

from tokenmill_engine.block_hash import BlockHash
from tokenmill_engine.kv_cache.events import BlockJournal


class BlockPool:
    """`num_blocks` blocks with ids 0 .. num_blocks - 1. A name is (KV group, hash).

    Names of group 0 that come and go are entered into `journal`, if there is one.
    """

    def __init__(self, num_blocks: int, journal: BlockJournal | None = None) -> None:
        self.num_blocks = num_blocks
        self._journal = journal
        self.num_free = num_blocks
        self._references = [0] * num_blocks
        self._names: list[tuple[int, BlockHash] | None] = [None] * num_blocks
        self._blocks_by_name: dict[tuple[int, BlockHash], int] = {}
        # The free list is a ring through the sentinel at index num_blocks: its successor is reused next.
        self._next = [*range(1, num_blocks + 1), 0]
        self._previous = [num_blocks, *range(num_blocks)]

    @property
    def usage(self) -> float:
        """Share of blocks that requests hold, 0 to 1."""
        return 1.0 - self.num_free / self.num_blocks

    @property
    def num_named(self) -> int:
        """Blocks that can be found by name, held or free."""
        return len(self._blocks_by_name)

    def references(self, block_id: int) -> int:
        return self._references[block_id]

    def find(self, group: int, block_hash: BlockHash) -> int | None:
        """The block with this content, if there is one."""
        return self._blocks_by_name.get((group, block_hash))

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` free blocks with one reference each; what they held is forgotten.

        Raises:
            ValueError: fewer are free. Nothing has changed then.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} are free")
        block_ids = []
        sentinel = self.num_blocks
        for _ in range(count):
            block_id = self._next[sentinel]
            self._unlink(block_id)
            self._forget(block_id)
            self._references[block_id] = 1
            block_ids.append(block_id)
        self.num_free -= count
        return block_ids

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add a reference to blocks found by name."""
        for block_id in block_ids:
            if self._references[block_id] == 0:
                self._unlink(block_id)
                self.num_free -= 1
            self._references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop a reference to each block of a table, first to last.

        The end of a table is reused before its beginning, which more prompts have in common.
        """
        sentinel = self.num_blocks
        for block_id in reversed(block_ids):
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                after = self._next[sentinel] if self._names[block_id] is None else sentinel
                self._link_before(block_id, after)
                self.num_free += 1

    def publish(self, block_id: int, group: int, block_hash: BlockHash) -> None:
        """Name the content of a held block. Of two blocks with equal content the first keeps the name."""
        name = (group, block_hash)
        if self._names[block_id] is None and name not in self._blocks_by_name:
            self._names[block_id] = name
            self._blocks_by_name[name] = block_id
            if self._journal is not None and group == 0:
                self._journal.store(block_hash)

    def names(self, group: int) -> list[BlockHash]:
        """Names of all blocks of a group that can be found."""
        return [block_hash for owner, block_hash in self._blocks_by_name if owner == group]

    def free_ids(self) -> list[int]:
        """Free blocks in the order of reuse."""
        block_ids = []
        block_id = self._next[self.num_blocks]
        while block_id != self.num_blocks:
            block_ids.append(block_id)
            block_id = self._next[block_id]
        return block_ids

    def check_invariants(self) -> None:
        """Raises AssertionError if the free list, the counts and the names contradict each other."""
        free = self.free_ids()
        assert len(free) == self.num_free == len(set(free))
        assert all(self._previous[self._next[block_id]] == block_id for block_id in [*free, self.num_blocks])
        unreferenced = {block_id for block_id, count in enumerate(self._references) if count == 0}
        assert unreferenced == set(free)
        assert min(self._references, default=0) >= 0
        named = {name: block_id for block_id, name in enumerate(self._names) if name is not None}
        assert named == self._blocks_by_name

    def _forget(self, block_id: int) -> None:
        name = self._names[block_id]
        if name is not None:
            del self._blocks_by_name[name]
            self._names[block_id] = None
            if self._journal is not None and name[0] == 0:
                self._journal.remove(name[1])

    def _unlink(self, block_id: int) -> None:
        before, after = self._previous[block_id], self._next[block_id]
        self._next[before] = after
        self._previous[after] = before

    def _link_before(self, block_id: int, after: int) -> None:
        before = self._previous[after]
        self._next[before] = block_id
        self._previous[block_id] = before
        self._next[block_id] = after
        self._previous[after] = block_id
