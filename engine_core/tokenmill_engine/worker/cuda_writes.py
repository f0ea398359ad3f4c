"""Changes of the slot tables that are too large for the entry of their step: runs of values in pinned memory, which a
kernel reads and scatters."""

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
    """Never waits, unless more than a few large changes are on their way."""

    def __init__(self, buffer: torch.Tensor, max_runs: int = _MAX_RUNS, max_values: int = _MAX_VALUES) -> None:
        """A launch carries at most `max_runs` runs and `max_values` values."""
        self._buffer = buffer
        self._ring = PinnedRing(_RING_SIZE, lambda: _Staging(max_runs, max_values, buffer.is_cuda), buffer.is_cuda)
        self._max_runs, self._max_values = max_runs, max_values

    def write(self, writes: Sequence[Write]) -> None:
        """Enqueue: put every run of values into its place; the places do not overlap."""
        staging = self._ring.take()
        for offset, values in writes:
            done, count = 0, len(values)
            while count - done > staging.room:
                part = staging.room
                if part:
                    staging.add(offset + done, values[done : done + part])
                done += part
                self._launch(staging)
                staging = self._ring.take()
            staging.add(offset + done, values[done:] if done else values)
        self._launch(staging)

    def _launch(self, staging: "_Staging") -> None:
        runs, longest = staging.seal()
        if len(runs):
            scatter_runs(self._buffer, runs, staging.values, longest)
        self._ring.mark_used()


class _Staging:
    """Runs for one launch, in pinned memory."""

    def __init__(self, max_runs: int, max_values: int, pinned: bool) -> None:
        self.values = torch.empty(max_values, dtype=torch.int32, pin_memory=pinned)
        self._values_host: NDArray[np.int32] = self.values.numpy()
        self._runs = torch.empty((max_runs, 3), dtype=torch.int64, pin_memory=pinned)
        self._runs_host: NDArray[np.int64] = self._runs.view(-1).numpy()
        self._max_runs, self._max_values = max_runs, max_values
        self._clear()

    def _clear(self) -> None:
        self._run_numbers: list[int] = []
        self._longest = self._num_values = 0
        self._short: list[int] = []
        """The last values, which are yet to be written."""

    @property
    def room(self) -> int:
        """Values that one more run may have."""
        return self._max_values - self._num_values if len(self._run_numbers) < 3 * self._max_runs else 0

    def add(self, offset: int, values: NDArray[np.int32] | list[int]) -> None:
        """One more run, with `room` for it."""
        count = len(values)
        self._run_numbers += (offset, self._num_values, count)
        self._longest = max(self._longest, count)
        if isinstance(values, list):
            self._short += values
        else:
            self._write_short()
            self._values_host[self._num_values : self._num_values + count] = values
        self._num_values += count

    def _write_short(self) -> None:
        """Many short lists are converted together: that each costs a microsecond by itself is seen in every step."""
        if self._short:
            self._values_host[self._num_values - len(self._short) : self._num_values] = self._short
            self._short = []

    def seal(self) -> tuple[torch.Tensor, int]:
        """(the runs, the longest of them); the next `add` begins anew."""
        self._write_short()
        self._runs_host[: len(self._run_numbers)] = self._run_numbers
        sealed = self._runs[: len(self._run_numbers) // 3], self._longest
        self._clear()
        return sealed
