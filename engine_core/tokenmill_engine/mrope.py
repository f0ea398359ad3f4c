"""Positions of tokens for M-RoPE (arXiv:2409.12191): each has one in time, one in height and one in width.

Text counts on in all three at once; the patches of an image share a time and differ in height and width; those of a
video differ in time too. What follows counts on from the largest position in it, so a prompt with images ends at a
smaller position than its length: the difference stays the same for all tokens generated behind it. Torch-free.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.config.media import MediaConfig

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


class Placed(Protocol):
    """Where an image or a video is in a prompt, as in `messages.MediaItem`."""

    @property
    def offset(self) -> int: ...
    @property
    def grid(self) -> Grid | None: ...
    @property
    def seconds_per_step(self) -> float | None: ...


def grid_spans(media: Iterable[Placed], tokens_per_second: float | None) -> Iterator[GridSpan]:
    """Those of `media` that have a grid. `tokens_per_second` as in `MediaConfig`."""
    for place in media:
        step = 1.0
        if tokens_per_second is not None and place.seconds_per_step is not None:
            step = tokens_per_second * place.seconds_per_step
        if place.grid is not None:
            yield GridSpan(place.offset, place.grid, step)


def position_delta(media: Iterable[GridSpan], merge_size: int) -> int:
    """What to add to the index of a token behind all of `media` for its position: the second of what `mrope_positions`
    gives. No position up to that token is larger."""
    delta = 0
    for span in media:
        time, height, width = span.grid
        rows, columns = height // merge_size, width // merge_size
        last = max(int(_times(np.array([time - 1], np.int32), span.time_step)[0]), rows - 1, columns - 1)
        delta += last + 1 - time * rows * columns
    return delta


def longest_with(media: Iterable[Placed], config: MediaConfig, num_positions: int) -> int:
    """Tokens of the longest prompt and output with these `media` of which all have one of `num_positions` positions."""
    if config.tokens_per_second is None:
        # An image, or a video of which only the steps count, has no more positions than tokens.
        return num_positions
    spans = grid_spans(media, config.tokens_per_second)
    return num_positions - position_delta(spans, config.vision.spatial_merge_size)


def _times(steps: NDArray[np.int32], time_step: float) -> NDArray[np.int32]:
    """Positions of steps in time."""
    # In single precision, as models were trained.
    return steps if time_step == 1.0 else (steps.astype(np.float32) * np.float32(time_step)).astype(np.int32)


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
        places[0] = _times(places[0], span.time_step)
        positions[:, offset:end] = start + places
        done, next_position = end, int(positions[:, offset:end].max()) + 1
    delta = next_position - done
    positions[:, done:] = np.arange(done + delta, num_tokens + delta)
    return positions, delta
