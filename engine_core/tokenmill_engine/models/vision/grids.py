"""Where the patches of images of any size lie, and in which order encoders see them. Torch-free.

Rows come as they are merged: the merge_size x merge_size patches of a square one after another, squares row by row.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.mrope import Grid


def patch_places(grids: Sequence[Grid], merge_size: int) -> NDArray[np.int64]:
    """(row, column) of each patch in its image, [num_patches, 2]."""
    places = []
    for time, height, width in grids:
        squares = np.indices((height, width)).reshape(
            2, height // merge_size, merge_size, width // merge_size, merge_size
        )
        places.append(np.tile(squares.transpose(1, 3, 2, 4, 0).reshape(-1, 2), (time, 1)))
    return np.concatenate(places).astype(np.int64)


def frame_lengths(grids: Sequence[Grid]) -> list[int]:
    """Patches of each frame of each image."""
    return [height * width for time, height, width in grids for _ in range(time)]


def window_order(grids: Sequence[Grid], merge_size: int, window: int) -> tuple[NDArray[np.int64], list[int]]:
    """Squares, [num_patches / merge_size^2], in an order in which those of a window come one after another; and the
    patches of each window. `window` squares on a side are a window; those at the edges are smaller."""
    order: list[NDArray[np.int64]] = []
    lengths: list[int] = []
    first = 0
    for time, height, width in grids:
        rows, columns = height // merge_size, width // merge_size
        squares = first + np.arange(time * rows * columns).reshape(time, rows, columns)
        first += squares.size
        windows = [
            frame[row : row + window, column : column + window]
            for frame in squares
            for row in range(0, rows, window)
            for column in range(0, columns, window)
        ]
        order += [squares_of.reshape(-1) for squares_of in windows]
        lengths += [squares_of.size * merge_size**2 for squares_of in windows]
    return np.concatenate(order).astype(np.int64), lengths
