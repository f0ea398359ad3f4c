"""Prepared media in memory that processes share: what is where, and how it is read.

A segment is anonymous memory that its writer, one process, fills, and that any number of others read. It has its full
size from the beginning, is sealed so that it never shrinks, and takes memory where it was written; it is gone with the
last process that has its descriptor, whatever ended that. Everything goes through `pread` and `pwrite`: nobody maps it,
so nobody can be ended by memory that is not there.

The first page says which writer the segment belongs to now. An object begins with a head that names it; its bytes
follow. A writer clears the head before it does anything else to the bytes behind it, and writes it last. So whoever
finds the expected head and the expected writer *after* it has copied the bytes has copied the right ones; anything else
counts as missing. No two objects ever have the same stamp.
"""

import fcntl
import os
import struct
from collections.abc import Mapping, Sequence
from math import prod
from typing import Final

import numpy as np

from tokenmill_engine.messages import MediaTensor, SharedObject

FIRST_OBJECT = 4096
"""Behind the page of the segment's own head."""
SEGMENT_HEAD = struct.Struct("<8s8s")
"""What this is, and the stamp of its writer."""
MAGIC = b"TMMEDIA1"
OBJECT_HEAD = struct.Struct("<8s16sQ32s")
"""What this is, its stamp (of the writer and of the object), its length in bytes, its key."""
_ALIGNMENT = 64
"""Of each tensor."""


def create_segment(num_bytes: int) -> int:
    """The descriptor of a segment of `num_bytes`, which nobody has written to; not inheritable by itself.

    Raises:
        OSError: the process may not have a file so large, or has too many open.
    """
    fd = os.memfd_create("tokenmill-media", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def object_head(shared: SharedObject, key: bytes) -> bytes:
    """What an object begins with."""
    return OBJECT_HEAD.pack(MAGIC, shared.stamp, shared.num_bytes, key)


def places_of(tensors: Mapping[str, MediaTensor]) -> tuple[dict[str, tuple[int, int]], int]:
    """Where each tensor's bytes begin and end in an object of these, and the length of all."""
    places: dict[str, tuple[int, int]] = {}
    end = 0
    for name, tensor in tensors.items():
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + num_bytes_of(tensor)
        places[name] = start, end
    return places, end


def num_bytes_of(tensor: MediaTensor) -> int:
    """By its shape."""
    return prod(tensor.shape) * np.dtype(tensor.dtype).itemsize


def without_data(tensors: Mapping[str, MediaTensor]) -> dict[str, MediaTensor]:
    """The same tensors, as they travel when their bytes are in an object."""
    return {name: MediaTensor(tensor.dtype, tensor.shape, b"") for name, tensor in tensors.items()}


class SegmentReader:
    """Reads one segment; any thread may. The descriptor stays the caller's."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._size = os.fstat(fd).st_size

    def read(
        self, shared: SharedObject, key: bytes, tensors: Mapping[str, MediaTensor]
    ) -> dict[str, MediaTensor] | None:
        """The tensors with their bytes, a copy; None if the object is not there (any more)."""
        places, num_bytes = places_of(tensors)
        if (
            num_bytes != shared.num_bytes
            or not FIRST_OBJECT <= shared.offset <= self._size - OBJECT_HEAD.size - num_bytes
        ):
            return None
        if not self.has(shared, key):
            return None
        data = np.empty(num_bytes, np.uint8).data
        if not self._fill(data, shared.offset + OBJECT_HEAD.size) or not self.has(shared, key):
            return None
        return {
            name: MediaTensor(tensor.dtype, tensor.shape, data[slice(*places[name])])
            for name, tensor in tensors.items()
        }

    def has(self, shared: SharedObject, key: bytes) -> bool:
        """Whether the object is there now. What was copied from it before is its own bytes then."""
        head = os.pread(self._fd, OBJECT_HEAD.size, shared.offset)
        if head != object_head(shared, key):
            return False
        writer = os.pread(self._fd, SEGMENT_HEAD.size, 0)
        return writer == SEGMENT_HEAD.pack(MAGIC, shared.stamp[:8])

    def _fill(self, target: memoryview, offset: int) -> bool:
        while target:
            count = os.preadv(self._fd, [target], offset)
            if count == 0:
                return False
            target, offset = target[count:], offset + count
        return True


class SharedObjects:
    """The segments of all API servers, as engine cores and workers read them."""

    def __init__(self, fds: Sequence[int]) -> None:
        """`fds`: by number of the API server; none where nothing is shared."""
        self._segments = [SegmentReader(fd) for fd in fds]

    def __len__(self) -> int:
        return len(self._segments)

    def read(
        self, shared: SharedObject, key: bytes, tensors: Mapping[str, MediaTensor]
    ) -> dict[str, MediaTensor] | None:
        """As `SegmentReader.read`."""
        if not 0 <= shared.segment < len(self._segments):
            return None
        return self._segments[shared.segment].read(shared, key, tensors)


NOTHING_SHARED: Final = SharedObjects(())
"""Where no memory is shared."""
