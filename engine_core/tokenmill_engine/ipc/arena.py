"""Which bytes of a piece of memory are taken: ranges in whole grains, none overlaps another.

Takes the smallest free range that is large enough, the first of equal ones. Knows nothing of what is in a range, and
touches no memory.
"""

from bisect import bisect_left, insort

GRAIN_BYTES = 4096
"""Ranges begin and end at multiples of it: those of pages."""


class Arena:
    """Free ranges of `capacity` bytes, rounded down to whole grains."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // GRAIN_BYTES * GRAIN_BYTES
        self._sizes: list[tuple[int, int]] = []
        """(size, start) of all free ranges, ascending."""
        self._by_start: dict[int, int] = {}
        """start -> size of those."""
        self._by_end: dict[int, int] = {}
        """end -> start of those."""
        if self.capacity > 0:
            self._insert(0, self.capacity)

    @property
    def num_free(self) -> int:
        """Bytes in all free ranges."""
        return sum(self._by_start.values())

    def take(self, num_bytes: int) -> int | None:
        """The start of a range of `num_bytes`, rounded up to whole grains; None if no free range is so large."""
        size = rounded(num_bytes)
        index = bisect_left(self._sizes, (size, 0))
        if index == len(self._sizes):
            return None
        found, start = self._sizes[index]
        self._remove(start, found)
        if found > size:
            self._insert(start + size, found - size)
        return start

    def give_back(self, start: int, num_bytes: int) -> None:
        """A range of `take` is free again, and one with its neighbours."""
        size = rounded(num_bytes)
        before = self._by_end.get(start)
        if before is not None:
            length = self._by_start[before]
            self._remove(before, length)
            start, size = before, size + length
        after = self._by_start.get(start + size)
        if after is not None:
            self._remove(start + size, after)
            size += after
        self._insert(start, size)

    def free_ranges(self) -> list[tuple[int, int]]:
        """(start, size) of all, ascending by start."""
        return sorted(self._by_start.items())

    def _insert(self, start: int, size: int) -> None:
        insort(self._sizes, (size, start))
        self._by_start[start] = size
        self._by_end[start + size] = start

    def _remove(self, start: int, size: int) -> None:
        del self._sizes[bisect_left(self._sizes, (size, start))]
        del self._by_start[start]
        del self._by_end[start + size]


def rounded(num_bytes: int) -> int:
    """What a range of `num_bytes` takes."""
    return max(1, -(-num_bytes // GRAIN_BYTES)) * GRAIN_BYTES
