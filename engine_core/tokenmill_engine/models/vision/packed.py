"""Attention within each of several runs of rows that lie one after another, all in one batch."""

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional as F


class PackedRuns:
    """Which rows see each other: those of the same run. Runs of equal length are computed together."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        """`lengths` of the runs, in order, none of them 0."""
        sizes = np.asarray(lengths, np.int64)
        starts = np.cumsum(sizes) - sizes
        distinct = np.unique(sizes).tolist()
        self._groups: list[tuple[int, torch.Tensor | None]] = []
        """(length, rows of all runs of that length; None for all rows there are)."""
        for length in distinct:
            rows = None
            if len(distinct) > 1:
                of_runs = starts[sizes == length][:, None] + np.arange(length)
                rows = torch.from_numpy(of_runs.reshape(-1)).to(device)
            self._groups.append((length, rows))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention without a mask, each [num_rows, num_heads, head_dim] -> [num_rows, num_heads * head_dim]."""
        out: torch.Tensor | None = None
        for length, rows in self._groups:
            parts = (q, k, v) if rows is None else tuple(heads.index_select(0, rows) for heads in (q, k, v))
            runs = [heads.reshape(-1, length, *heads.shape[1:]).transpose(1, 2) for heads in parts]
            attended = (
                F.scaled_dot_product_attention(runs[0], runs[1], runs[2]).transpose(1, 2).flatten(2).flatten(0, 1)
            )
            if rows is None:
                return attended
            out = q.new_empty(len(q), attended.shape[1]) if out is None else out
            out.index_copy_(0, rows, attended)
        return q.flatten(1) if out is None else out
