"""Work on prompts that is done once for requests that have the same one: the choices of one API request."""

import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.block_hash import BlockHash, CacheKey, hash_full_blocks
from tokenmill_engine.request import Request


class LastPrompt:
    """The prompt of the last request, with the names of its full blocks. Choices of one prompt arrive in a row."""

    def __init__(self, block_size: int, hash_blocks: bool) -> None:
        self._block_size = block_size
        self._hash_blocks = hash_blocks
        self._token_ids: NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self._cache_key = CacheKey()
        self._hashes: list[BlockHash] = []

    def share_with(self, request: Request) -> None:
        """Name the full blocks of the request's prompt; if it is the last prompt again, the request takes that one's
        array in place of its own."""
        known = request.cache_key == self._cache_key and np.array_equal(request.prompt_token_ids, self._token_ids)
        if known:
            request.prompt_token_ids = self._token_ids
        else:
            self._token_ids, self._cache_key = request.prompt_token_ids, request.cache_key
            if self._hash_blocks:
                self._hashes = hash_full_blocks(request.prompt_token_ids, self._block_size, request.cache_key)
        # A copy: names of generated blocks are appended to it.
        request.block_hashes = list(self._hashes)
