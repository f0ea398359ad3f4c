"""Positions of tokens for M-RoPE (arXiv:2409.12191): each has one in time, one in height and one in width.

Text counts on in all three at once; the patches of an image share a time and differ in height and width. What follows
an image counts on from the largest position in it, so a prompt with images ends at a smaller position than its length:
the difference stays the same for all tokens generated behind it. Torch-free.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Grid = tuple[int, int, int]
"""(time, height, width) of an image in patches, before they are merged."""


def mrope_positions(
    num_tokens: int, images: Iterable[tuple[int, Grid]], merge_size: int
) -> tuple[NDArray[np.int32], int]:
    """Positions int32 [3, num_tokens] of a prompt, and what to add to the index of any later token for its position.

    `images` are (first token, grid), ascending and not overlapping; `merge_size` patches on a side become one token.
    The positions of a token do not depend on what follows it. Raises ValueError for an image that does not fit.
    """
    positions = np.empty((3, num_tokens), np.int32)
    done, next_position = 0, 0
    for offset, (time, height, width) in images:
        rows, columns = height // merge_size, width // merge_size
        end = offset + time * rows * columns
        if not done <= offset < end <= num_tokens:
            raise ValueError(f"an image of grid {(time, height, width)} at token {offset} overlaps or is cut off")
        start = next_position + offset - done
        positions[:, done:offset] = np.arange(next_position, start)
        positions[:, offset:end] = start + np.indices((time, rows, columns)).reshape(3, -1)
        done, next_position = end, int(positions[:, offset:end].max()) + 1
    delta = next_position - done
    positions[:, done:] = np.arange(done + delta, num_tokens + delta)
    return positions, delta
