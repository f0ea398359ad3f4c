"""Positions of tokens in requests with images, for models with M-RoPE (`mrope`). On the host.

Up to the end of its last image a prompt has three positions for each token; behind it they are the same again, and
differ from the token's index by a number that stays."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.mrope import grid_spans, mrope_positions
from tokenmill_engine.outputs import SlotStart

_Positions = NDArray[np.int32]


class SlotPositions:
    """One entry per slot."""

    def __init__(self, num_slots: int, merge_size: int, tokens_per_second: float | None = None) -> None:
        """`tokens_per_second` as in `MediaConfig`."""
        self._merge_size = merge_size
        self._tokens_per_second = tokens_per_second
        self._known: dict[int, _Positions] = {}
        """By slot with images, [3, end of the last one]."""
        self._ends = np.zeros(num_slots, np.int32)
        """[num_slots] how many are known."""
        self._deltas = np.zeros(num_slots, np.int32)
        """[num_slots] what to add to the index of later tokens."""

    def start(self, starts: Sequence[SlotStart]) -> None:
        """Requests take their slots."""
        for start in starts:
            self._known.pop(start.slot, None)
            self._ends[start.slot] = self._deltas[start.slot] = 0
            if start.media:
                end = start.media[-1].offset + start.media[-1].num_tokens
                spans = grid_spans(start.media, self._tokens_per_second)
                known, delta = mrope_positions(end, spans, self._merge_size)
                self._known[start.slot], self._deltas[start.slot], self._ends[start.slot] = known, delta, end

    def delta(self, slot: int) -> int:
        """What to add to the index of a token behind the last image for its position."""
        return int(self._deltas[slot])

    def known(
        self, slots: NDArray[np.int32], first: NDArray[np.int32], query_start: NDArray[np.int32]
    ) -> tuple[NDArray[np.int64], _Positions] | None:
        """Which tokens of a step come before the end of the last image of their request, int64 [num_known], and their
        positions [3, num_known]; None if there are none. Tokens `query_start[i]` .. `query_start[i + 1]` - 1 are of
        slot `slots[i]`, whose tokens from index `first[i]` on they are."""
        rows = (first < self._ends[slots]).nonzero()[0].tolist()
        if not rows:
            return None
        tokens: list[NDArray[np.int64]] = []
        positions: list[_Positions] = []
        for row in rows:
            start, index = int(query_start[row]), int(first[row])
            of_row = self._known[int(slots[row])][:, index : index + int(query_start[row + 1]) - start]
            tokens.append(np.arange(start, start + of_row.shape[1]))
            positions.append(of_row)
        return np.concatenate(tokens), np.concatenate(positions, axis=1)

    def turn(self, slots: NDArray[np.int32], indexes: _Positions, query_start: NDArray[np.int32]) -> _Positions:
        """Positions of tokens at `indexes` [num_tokens] of their requests: [num_tokens] where the three are the same
        for all, else [3, num_tokens]. Rows as in `known`."""
        known = self.known(slots, indexes[query_start[:-1]], query_start)
        deltas = self._deltas[slots]
        if deltas.any():
            indexes = indexes + np.repeat(deltas, np.diff(query_start))
        if known is None:
            return indexes
        positions = np.tile(indexes, (3, 1))
        positions[:, known[0]] = known[1]
        return positions
