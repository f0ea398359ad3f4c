"""Which blocks the prefix cache of a rank holds, as far as one API server knows.

Engines tell what they have stored and removed, some milliseconds late. Between sending a prompt and hearing that it is
stored, its blocks are expected. An expectation needs no end: whoever relies on it sends the next prompt to the same
rank, which then has the blocks.
"""

from collections.abc import Iterable, Sequence

_MAX_EXPECTED = 1 << 16
"""Expected blocks after which those that were expected before them are forgotten."""


class CachedBlocks:
    """One rank's prefix cache. Blocks have the names of `block_hash.short_name`."""

    __slots__ = ("_expected", "_expected_before", "_stored")

    def __init__(self) -> None:
        self._stored: set[int] = set()
        self._expected: set[int] = set()
        self._expected_before: set[int] = set()

    def __len__(self) -> int:
        """Blocks that the engine said it has."""
        return len(self._stored)

    def replace(self, names: Iterable[int]) -> None:
        """The engine said what it has, all of it. What is on its way there still is."""
        self._stored = set(names)

    def store(self, names: Iterable[int]) -> None:
        """The engine has these blocks too."""
        self._stored.update(names)

    def remove(self, names: Sequence[int]) -> None:
        """The engine has forgotten these blocks: they are not expected either."""
        for known in (self._stored, self._expected, self._expected_before):
            known.difference_update(names)

    def expect(self, names: Iterable[int]) -> None:
        """A prompt with these blocks is on its way."""
        self._expected.update(names)
        if len(self._expected) >= _MAX_EXPECTED:
            self._expected, self._expected_before = set(), self._expected

    def count_leading(self, names: Sequence[int]) -> int:
        """How many of a prompt's blocks, from the first on, are here."""
        stored, expected, before = self._stored, self._expected, self._expected_before
        for index, name in enumerate(names):
            if name not in stored and name not in expected and name not in before:
                return index
        return len(names)
