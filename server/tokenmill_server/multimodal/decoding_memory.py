"""Memory of the images that are being decoded and prepared: together they take at most so much, in order of arrival."""

import ctypes
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 8 << 20
"""Pillow has its pixels in blocks of 16 MiB."""


def return_large_blocks() -> None:
    """From now on this process gives large blocks of memory back once they are free. By itself glibc keeps them after
    it has seen some, for each thread its own: several times of what images take at a time."""
    with suppress(AttributeError, OSError):  # other libraries have no such setting
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


class DecodingMemory:
    """Threads share it. What a thread holds it gives back when it is done with its image."""

    def __init__(self, capacity: int) -> None:
        """`capacity`: bytes."""
        self._capacity = capacity
        self._free = capacity
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def lease(self) -> Iterator["Lease"]:
        """For one image; nothing yet. What was taken is given back at the end."""
        lease = Lease(self)
        try:
            yield lease
        finally:
            self._give(lease.num_bytes)

    def take(self, num_bytes: int) -> int:
        """Waits until there is so much, behind those who came before. Returns what was taken: an image that alone is
        larger than all there is gets all of it, once nobody else has any."""
        wanted = min(num_bytes, self._capacity)
        turn = object()
        with self._changed:
            self._waiting.append(turn)
            self._changed.wait_for(lambda: self._waiting[0] is turn and self._free >= wanted)
            self._waiting.popleft()
            self._free -= wanted
            self._changed.notify_all()
        return wanted

    def _give(self, num_bytes: int) -> None:
        with self._changed:
            self._free += num_bytes
            self._changed.notify_all()


class Lease:
    """What one image takes. Used by one thread."""

    def __init__(self, memory: DecodingMemory) -> None:
        self._memory = memory
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """As `DecodingMemory.take`, once: who held some and waited for more could wait for ever."""
        if self.num_bytes:
            raise RuntimeError("an image takes its memory at once")
        self.num_bytes = self._memory.take(num_bytes)
