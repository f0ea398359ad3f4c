"""Which KV blocks each running request holds, and which prefixes are cached.

Every request has one block table per KV group. All groups keep one block per `block_size` tokens and take them from
one pool, so block ids are unique across groups. The manager does what the scheduler decided; the questions that
decide (`find_cached`, `num_blocks`, `count_freed`) change nothing.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokenmill_engine.block_hash import BlockHash
from tokenmill_engine.kv_cache.block_pool import BlockPool
from tokenmill_engine.kv_cache.events import BlockJournal

BlockIds = tuple[list[int], ...]
"""Block ids per KV group, in the order of positions."""


@dataclass(slots=True, frozen=True)
class CachedPrefix:
    """Blocks that already hold the keys and values of a prompt's first tokens."""

    block_ids: BlockIds
    num_tokens: int

    def all_ids(self) -> Iterable[int]:
        """The blocks of all groups."""
        return (block_id for table in self.block_ids for block_id in table)


@dataclass(slots=True)
class _Table:
    block_ids: BlockIds
    num_published: int
    """Leading full blocks, per group, whose names were offered to the pool."""


class KVCacheManager:
    """Block tables of all running requests over one `BlockPool`, whose names `journal` follows."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_groups: int = 1,
        enable_caching: bool = True,
        journal: BlockJournal | None = None,
    ) -> None:
        self.block_size = block_size
        self.num_groups = num_groups
        self.enable_caching = enable_caching
        self.pool = BlockPool(num_blocks, journal)
        self._tables: dict[int, _Table] = {}

    @property
    def max_tokens(self) -> int:
        """Longest request that fits with the pool to itself."""
        return self.pool.num_blocks // self.num_groups * self.block_size

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take, over all groups."""
        return -(-num_tokens // self.block_size) * self.num_groups

    def find_cached(self, hashes: Sequence[BlockHash], max_tokens: int) -> CachedPrefix:
        """Longest cached prefix of at most `max_tokens` tokens, for a request whose full blocks have these names."""
        groups = range(self.num_groups)
        block_ids: BlockIds = tuple([] for _ in groups)
        for block_hash in hashes[: max_tokens // self.block_size]:
            found = [self.pool.find(group, block_hash) for group in groups]
            if None in found:
                break
            for table, block_id in zip(block_ids, found, strict=True):
                if block_id is not None:
                    table.append(block_id)
        return CachedPrefix(block_ids, len(block_ids[0]) * self.block_size)

    def count_freed(self, request_ids: Iterable[int]) -> int:
        """Blocks that would become free if all of these requests released theirs."""
        releases = Counter(
            block_id for request_id in request_ids for table in self.block_ids(request_id) for block_id in table
        )
        return sum(self.pool.references(block_id) == count for block_id, count in releases.items())

    def request_ids(self) -> set[int]:
        """Requests that hold a table."""
        return set(self._tables)

    def block_ids(self, request_id: int) -> BlockIds:
        return self._tables[request_id].block_ids

    def start(self, request_id: int, cached: CachedPrefix) -> None:
        """Give the request a table that begins with `cached`."""
        if request_id in self._tables:
            raise ValueError(f"request {request_id} has a block table already")
        self.pool.acquire(cached.all_ids())
        num_published = cached.num_tokens // self.block_size
        self._tables[request_id] = _Table(tuple(list(ids) for ids in cached.block_ids), num_published)

    def grow(self, request_id: int, num_tokens: int) -> BlockIds:
        """Extend the tables to hold `num_tokens` tokens; returns the new blocks per group.

        Raises:
            ValueError: not enough blocks are free.
        """
        tables = self._tables[request_id].block_ids
        count = -(-num_tokens // self.block_size) - len(tables[0])
        new = []
        for table in tables:
            block_ids = self.pool.allocate(count)
            table += block_ids
            new.append(block_ids)
        return tuple(new)

    def publish(self, request_id: int, hashes: Sequence[BlockHash], num_full: int) -> None:
        """Name the request's first `num_full` blocks of each group: computed, and never written again."""
        table = self._tables[request_id]
        for index in range(table.num_published, num_full):
            for group, block_ids in enumerate(table.block_ids):
                self.pool.publish(block_ids[index], group, hashes[index])
        table.num_published = num_full

    def release(self, request_id: int) -> None:
        """Take the request's blocks back; named ones stay findable until they are reused."""
        for block_ids in self._tables.pop(request_id).block_ids:
            self.pool.release(block_ids)

    def check_invariants(self) -> None:
        """Raises AssertionError if tables and reference counts contradict each other."""
        self.pool.check_invariants()
        held: Counter[int] = Counter()
        for table in self._tables.values():
            assert len(table.block_ids) == self.num_groups
            assert len({len(ids) for ids in table.block_ids}) == 1
            assert table.num_published <= len(table.block_ids[0])
            held.update(block_id for ids in table.block_ids for block_id in ids)
        for block_id in range(self.pool.num_blocks):
            assert self.pool.references(block_id) == held[block_id]
