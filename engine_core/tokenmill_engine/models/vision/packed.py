"""Attention within each of several runs of rows that lie one after another, all in one batch."""

import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from torch.nn import functional as F

from tokenmill_engine.sampling.transfer import to_device
from tokenmill_kernels.cpu import library

_SMALLEST_PART = 1 << 22
"""Products of a query and a key, times head_dim, that are worth a thread."""
_HEAD_GRAIN = 8
"""What the width of heads must divide by for the packed kernel."""


class PackedRuns:
    """Which rows see each other: those of the same run. On a GPU with numbers of 16 bits all runs are one launch,
    whatever their lengths; elsewhere those of equal length are computed together."""

    def __init__(self, lengths: Sequence[int], device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        """`lengths` of the runs, in order, none of them 0. `dtype`: of what attends."""
        sizes = np.asarray(lengths, np.int64)
        ends = np.cumsum(sizes)
        self._longest = int(sizes.max(initial=0))
        self._packed = _packed_attention() if device.type == "cuda" and dtype.itemsize == 2 else None
        self._bounds: torch.Tensor | None = None
        """int32 [num_runs + 1]: first row of each run and the end of the last, for the packed kernel."""
        if self._packed is not None:
            self._bounds = to_device(np.concatenate(([0], ends)).astype(np.int32), device)
        self._sizes, self._starts, self._device = sizes, ends - sizes, device
        self._groups_made: list[tuple[int, torch.Tensor | None]] | None = None

    @property
    def _groups(self) -> list[tuple[int, torch.Tensor | None]]:
        """(length, rows of all runs of that length; None for all rows there are)."""
        if self._groups_made is None:
            distinct = np.unique(self._sizes).tolist()
            self._groups_made = [(length, self._rows(length) if len(distinct) > 1 else None) for length in distinct]
        return self._groups_made

    def _rows(self, length: int) -> torch.Tensor:
        of_runs = self._starts[self._sizes == length][:, None] + np.arange(length)
        return to_device(of_runs.reshape(-1), self._device)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention without a mask, each [num_rows, num_heads, head_dim] -> [num_rows, num_heads * head_dim]."""
        if self._packed is not None and q.shape[2] % _HEAD_GRAIN == 0:
            bounds, longest = self._bounds, self._longest
            return self._packed(q, k, v, bounds, bounds, longest, longest).flatten(1)
        out: torch.Tensor | None = None
        for length, rows in self._groups:
            parts = (q, k, v) if rows is None else tuple(heads.index_select(0, rows) for heads in (q, k, v))
            runs = [heads.reshape(-1, length, *heads.shape[1:]).transpose(1, 2) for heads in parts]
            attended = _attend(runs[0], runs[1], runs[2]).transpose(1, 2).flatten(2).flatten(0, 1)
            if rows is None:
                return attended
            out = q.new_empty(len(q), attended.shape[1]) if out is None else out
            out.index_copy_(0, rows, attended)
        return q.flatten(1) if out is None else out


@cache
def _packed_attention() -> Callable[..., torch.Tensor] | None:
    """FlashAttention over runs of any lengths, on GPUs; None where torch does not have it. To import it takes a second,
    for torch's compiler comes with it."""
    try:
        attention: Callable[..., torch.Tensor] = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    return attention


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of each run and head by itself, each [num_runs, num_heads, length, head_dim]."""
    num_runs, num_heads, length, _ = q.shape
    num_parts = min(q.numel() * length // _SMALLEST_PART, _spare_threads(q.device))
    if num_parts < 2:
        return F.scaled_dot_product_attention(q, k, v)
    dim = 0 if num_runs >= num_heads else 1
    parts = zip(*(heads.chunk(num_parts, dim) for heads in (q, k, v)), strict=True)
    return torch.cat(list(_threads(num_parts).map(_attend_part, parts)), dim)


def _attend_part(heads: tuple[torch.Tensor, ...]) -> torch.Tensor:
    q, k, v = heads
    with torch.inference_mode():
        return F.scaled_dot_product_attention(q, k, v)


def _spare_threads(device: torch.device) -> int:
    """Beside the library's threads a worker lets torch have one; those that the library does not need meanwhile."""
    return library.num_threads() if device.type == "cpu" and torch.get_num_threads() == 1 else 1


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    """Threads that run torch operators alone. They sleep while there is nothing to do."""
    return ThreadPoolExecutor(count, "vision", initializer=torch.set_num_threads, initargs=(1,))
