"""What the prefix cache gains and loses, for API servers that choose an engine by the blocks it has."""

from tokenmill_engine.block_hash import BlockHash


class BlockJournal:
    """Named blocks that came and went since the last `take`. What came and went in between is not told."""

    def __init__(self) -> None:
        self._stored: set[BlockHash] = set()
        self._removed: set[BlockHash] = set()

    @property
    def is_empty(self) -> bool:
        return not self._stored and not self._removed

    def store(self, block_hash: BlockHash) -> None:
        """A block has this name now."""
        if block_hash in self._removed:
            self._removed.remove(block_hash)
        else:
            self._stored.add(block_hash)

    def remove(self, block_hash: BlockHash) -> None:
        """No block has this name any more."""
        if block_hash in self._stored:
            self._stored.remove(block_hash)
        else:
            self._removed.add(block_hash)

    def take(self) -> tuple[set[BlockHash], set[BlockHash]]:
        """Names that are new and names that are gone, against the last time."""
        stored, removed = self._stored, self._removed
        self._stored, self._removed = set(), set()
        return stored, removed
