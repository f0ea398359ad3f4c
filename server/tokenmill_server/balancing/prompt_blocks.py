"""Names of a prompt's blocks, as engines name them, so that a request can be sent to where its prefix is cached."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.block_hash import BlockHash, CacheKey, hash_block, media_spans, short_name
from tokenmill_engine.messages import MediaItem


@dataclass(slots=True, frozen=True)
class PromptBlocks:
    """What balancing needs to know of a prompt and the sequences that continue it."""

    num_tokens: int
    num_sequences: int = 1
    names: tuple[int, ...] = ()
    """Of the full blocks that a prefix cache can answer, first to last. Empty where no cache is asked."""


class BlockNames:
    """Names the blocks of one prompt after the other. What a prompt shares with the one before is not hashed again: the
    beams of a search, and all of their steps, have a long prompt in common."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._salt: str | None = None
        self._tokens: NDArray[np.int32] = np.empty(0, np.int32)
        self._hashes: list[BlockHash] = []
        self._names: list[int] = []

    def of(
        self, token_ids: Sequence[int], cache_salt: str | None = None, media: Sequence[MediaItem] = ()
    ) -> tuple[int, ...]:
        """`PromptBlocks.names` of a prompt with `media` in it. Takes about a microsecond per block that is new."""
        tokens = np.array(array("i", token_ids), np.int32)
        shared = self._num_shared(tokens) if cache_salt == self._salt and not media else 0
        del self._hashes[shared:], self._names[shared:]
        size = self._block_size
        key = CacheKey(cache_salt=cache_salt, media=media_spans(media))
        parent = self._hashes[-1] if shared else key.root()
        # The last token is always computed: its logits are what comes next.
        for start in range(shared * size, len(tokens) - size, size):
            parent = hash_block(parent, tokens[start : start + size].tobytes(), key.extra(start, start + size))
            self._hashes.append(parent)
            self._names.append(short_name(parent))
        names = tuple(self._names)
        self._salt, self._tokens = cache_salt, tokens
        if media:
            self._tokens, self._hashes, self._names = tokens[:0], [], []
        return names

    def _num_shared(self, tokens: NDArray[np.int32]) -> int:
        """Blocks at the beginning that the last prompt had, too, and that have a name in both."""
        both = min(len(tokens), len(self._tokens))
        differs = tokens[:both] != self._tokens[:both]
        num_equal = int(differs.argmax()) if differs.any() else both
        return min(num_equal // self._block_size, len(self._hashes), max(0, len(tokens) - 1) // self._block_size)
