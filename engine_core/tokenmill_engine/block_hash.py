"""Names of full KV blocks by content: a hash chain over everything their keys and values depend on.

A block's hash covers its parent's hash, its tokens and the media that lie in it; the chain starts at a root made of
what holds for the whole request (LoRA adapter, cache salt). SHA-256 cut to 128 bits: nobody can construct two
prompts that share a name, so one user never reads another's cache.

API servers name the blocks of prompts too, to find the engine core that has them: this module knows nothing of pools.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import NewType

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.messages import MediaItem

BlockHash = NewType("BlockHash", bytes)

_HASH_BYTES = 16
_SHORT_BYTES = 8


@dataclass(slots=True, frozen=True)
class MediaSpan:
    """Prompt positions `start` .. `end` - 1 stand for one image, audio or video with this content hash."""

    start: int
    end: int
    content_hash: str


_end_of = attrgetter("end")


def media_spans(items: Iterable[MediaItem]) -> tuple[MediaSpan, ...]:
    """Where the media of a prompt stand. What decides the positions of the tokens behind it counts too."""
    return tuple(
        MediaSpan(
            item.offset,
            item.offset + item.num_tokens,
            f"{item.kind}:{item.key.hex()}:{item.grid}:{item.seconds_per_step}",
        )
        for item in items
    )


@dataclass(slots=True, frozen=True)
class CacheKey:
    """What the keys and values of a request depend on beside its token ids."""

    lora_id: int | None = None
    cache_salt: str | None = None
    media: tuple[MediaSpan, ...] = ()
    """Ascending; none overlaps another."""

    def root(self) -> BlockHash:
        """The parent of the first block."""
        document = msgspec.msgpack.encode(("tokenmill", self.lora_id, self.cache_salt))
        return BlockHash(hashlib.sha256(document).digest()[:_HASH_BYTES])

    def extra(self, start: int, end: int) -> bytes:
        """Media in positions `start` .. `end` - 1: content and offset, so that a shifted image is another block."""
        if not self.media:
            return b""
        inside = []
        for index in range(bisect_right(self.media, start, key=_end_of), len(self.media)):
            span = self.media[index]
            if span.start >= end:
                break
            inside.append((span.start - start, span.content_hash))
        return msgspec.msgpack.encode(inside) if inside else b""


def hash_block(parent: BlockHash, token_ids: bytes, extra: bytes = b"") -> BlockHash:
    """Name of the full block with int32 `token_ids` after `parent`. All blocks of a pool have equal size."""
    return BlockHash(hashlib.sha256(parent + token_ids + extra).digest()[:_HASH_BYTES])


def hash_full_blocks(token_ids: NDArray[np.int32], block_size: int, key: CacheKey) -> list[BlockHash]:
    """Names of the full blocks of `token_ids` [num_tokens], first to last."""
    parent = key.root()
    hashes: list[BlockHash] = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        end = start + block_size
        parent = hash_block(parent, token_ids[start:end].tobytes(), key.extra(start, end))
        hashes.append(parent)
    return hashes


def short_name(block_hash: BlockHash) -> int:
    """The block in `messages.BlockEvents`: the first 8 bytes of its hash as a little-endian integer. Enough to guess
    who has a block, not to read it."""
    return int.from_bytes(block_hash[:_SHORT_BYTES], "little")


def pack_short_names(block_hashes: Iterable[BlockHash]) -> bytes:
    """Their short names as uint64, little-endian."""
    return b"".join([block_hash[:_SHORT_BYTES] for block_hash in block_hashes])
