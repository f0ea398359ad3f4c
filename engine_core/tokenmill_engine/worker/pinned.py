"""Pinned host memory that is used again and again: no step allocates any.

Pinning memory costs more than a step, and what a copy or a kernel still reads must not be written.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

T = TypeVar("T")


class PinnedRing(Generic[T]):
    """A few buffers for one direction, taken in turn; each is free again when the device is done with it."""

    def __init__(self, size: int, make: Callable[[], T], on_cuda: bool) -> None:
        self._buffers = [make() for _ in range(size)]
        self._done = [torch.cuda.Event() for _ in range(size)] if on_cuda else None  # type: ignore[no-untyped-call]
        self._next = 0

    def take(self) -> T:
        """The next buffer. Waits if the device still reads it, which it does only if it is `size` uses behind."""
        if self._done is not None:
            self._done[self._next].synchronize()
        return self._buffers[self._next]

    def mark_used(self) -> None:
        """What was enqueued so far on the current stream is all that reads the buffer taken last."""
        if self._done is not None:
            self._done[self._next].record()
        self._next = (self._next + 1) % len(self._buffers)


class StepBuffers:
    """The host's side of one step in flight: what it sends, what it gets back, and when that was."""

    def __init__(self, num_sent: int, num_rows: int) -> None:
        self.sent = torch.empty(num_sent, dtype=torch.int32, pin_memory=True)
        self.sent_host: NDArray[np.int32] = self.sent.numpy()
        self.token_ids = torch.empty(num_rows, dtype=torch.int32, pin_memory=True)
        self.token_ids_host: NDArray[np.int32] = self.token_ids.numpy()
        self.started = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.finished = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class BufferPool(Generic[T]):
    """Buffers of steps in flight: as many as were ever in use at once."""

    def __init__(self, size: int, make: Callable[[], T]) -> None:
        self._make = make
        self._free = [make() for _ in range(size)]

    def take(self) -> T:
        return self._free.pop() if self._free else self._make()

    def give_back(self, buffers: T) -> None:
        """Once the step is done and its result was read."""
        self._free.append(buffers)
