"""Changes of the slot tables on their way to a GPU: runs of values in pinned memory, which one kernel reads and
scatters. Usually one launch per step, however many requests it is for."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill_engine.worker.pinned import PinnedRing
from tokenmill_engine.worker.slots import Write
from tokenmill_kernels.gpu.scatter import scatter_runs

_MAX_RUNS = 1024
_MAX_VALUES = 1 << 15
_RING_SIZE = 4


class ScatterWriter:
    """As `slots.TableWriter`. Never waits, unless more than a few large changes are on their way."""

    def __init__(self, buffer: torch.Tensor, max_runs: int = _MAX_RUNS, max_values: int = _MAX_VALUES) -> None:
        """A launch carries at most `max_runs` runs and `max_values` values."""
        self._buffer = buffer
        self._ring = PinnedRing(_RING_SIZE, lambda: _Staging(max_runs, max_values, buffer.is_cuda), buffer.is_cuda)
        self._max_runs, self._max_values = max_runs, max_values

    def write(self, writes: Sequence[Write]) -> None:
        runs: list[tuple[int, int, int]] = []
        num_values, staging = 0, self._ring.take()
        for offset, values in writes:
            done = 0
            while done < len(values):
                if num_values == self._max_values or len(runs) == self._max_runs:
                    self._launch(staging, runs)
                    runs, num_values, staging = [], 0, self._ring.take()
                count = min(len(values) - done, self._max_values - num_values)
                staging.values_host[num_values : num_values + count] = values[done : done + count]
                runs.append((offset + done, num_values, count))
                num_values += count
                done += count
        if runs:
            self._launch(staging, runs)

    def _launch(self, staging: "_Staging", runs: list[tuple[int, int, int]]) -> None:
        staging.runs_host[: len(runs)] = runs
        longest = max(count for _, _, count in runs)
        scatter_runs(self._buffer, staging.runs[: len(runs)], staging.values, longest)
        self._ring.mark_used()


class _Staging:
    def __init__(self, max_runs: int, max_values: int, pinned: bool) -> None:
        self.runs = torch.empty((max_runs, 3), dtype=torch.int64, pin_memory=pinned)
        self.values = torch.empty(max_values, dtype=torch.int32, pin_memory=pinned)
        self.runs_host: NDArray[np.int64] = self.runs.numpy()
        self.values_host: NDArray[np.int32] = self.values.numpy()
