"""Positions of tokens for M-RoPE (arXiv:2409.12191): each has one in time, one in height and one in width.

Text counts on in all three at once; the patches of an image share a time and differ in height and width; those of a
video differ in time too. What follows counts on from the largest position in it, so a prompt with images ends at a
smaller position than its length: the difference stays the same for all tokens generated behind it. Torch-free.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Grid = tuple[int, int, int]
"""(time, height, width) of an image or video in patches, before they are merged."""


@dataclass(frozen=True, slots=True)
class GridSpan:
    """An image or a video in a prompt."""

    offset: int
    """Its first token."""
    grid: Grid
    time_step: float = 1.0
    """Positions from one patch in time to the next; the sum is cut to whole ones."""


def mrope_positions(num_tokens: int, media: Iterable[GridSpan], merge_size: int) -> tuple[NDArray[np.int32], int]:
    """Positions int32 [3, num_tokens] of a prompt, and what to add to the index of any later token for its position.

    `media` are ascending and do not overlap; `merge_size` patches on a side become one token. The positions of a token
    do not depend on what follows it. Raises ValueError for an image that does not fit.
    """
    positions = np.empty((3, num_tokens), np.int32)
    done, next_position = 0, 0
    for span in media:
        offset, (time, height, width) = span.offset, span.grid
        rows, columns = height // merge_size, width // merge_size
        end = offset + time * rows * columns
        if not done <= offset < end <= num_tokens:
            raise ValueError(f"an image of grid {(time, height, width)} at token {offset} overlaps or is cut off")
        start = next_position + offset - done
        positions[:, done:offset] = np.arange(next_position, start)
        places = np.indices((time, rows, columns), np.int32).reshape(3, -1)
        if span.time_step != 1.0:
            # In single precision, as models were trained.
            places[0] = (places[0].astype(np.float32) * np.float32(span.time_step)).astype(np.int32)
        positions[:, offset:end] = start + places
        done, next_position = end, int(positions[:, offset:end].max()) + 1
    delta = next_position - done
    positions[:, done:] = np.arange(done + delta, num_tokens + delta)
    return positions, delta
