"""Pinned host memory that is used again and again: no step allocates any.

Pinning memory costs more than a step, and what a copy or a kernel still reads must not be written.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

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
