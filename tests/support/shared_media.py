"""Objects in shared memory: tensors whose bytes tell which they are, and a segment to keep them in."""

import contextlib
import hashlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tokenmill_engine.ipc.arena import GRAIN_BYTES
from tokenmill_engine.ipc.object_store import ObjectStore
from tokenmill_engine.ipc.shared_objects import FIRST_OBJECT, create_segment
from tokenmill_engine.messages import MediaTensor

TABLE_BYTES = 4 * 3 * 256


def key_of(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def tensors_of(number: int, num_pixels: int) -> dict[str, MediaTensor]:
    """Pixels and a table, as processors make them; other numbers have other ones."""
    source = random.Random(f"{number} {num_pixels}")
    table = np.array([source.random() for _ in range(768)], "<f4")
    return {
        "pixel_values": MediaTensor("uint8", (num_pixels,), source.randbytes(num_pixels)),
        "values": MediaTensor("float32", (3, 256), table.tobytes()),
    }


def same(one: dict[str, MediaTensor] | None, other: dict[str, MediaTensor]) -> bool:
    """Whether all is alike, and in the same order."""
    return one is not None and [(name, each.dtype, each.shape, bytes(each.data)) for name, each in one.items()] == [
        (name, each.dtype, each.shape, bytes(each.data)) for name, each in other.items()
    ]


@contextlib.contextmanager
def segment(num_grains: int) -> Iterator[int]:
    """The descriptor of one with room for so many grains."""
    fd = create_segment(FIRST_OBJECT + num_grains * GRAIN_BYTES)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def object_store(num_grains: int, max_object_bytes: int = 1 << 30, number: int = 0) -> Iterator[ObjectStore]:
    with segment(num_grains) as fd:
        yield ObjectStore(fd, number, max_object_bytes)


def segments_of(pid: int) -> set[int]:
    """Inodes of the segments that a process has open; none of one that is gone or somebody else's."""
    return set(segment_sizes(pid))


def segment_sizes(pid: int) -> dict[int, int]:
    """Bytes of memory that those segments have taken."""
    found = {}
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if "tokenmill-media" in os.readlink(fd):
                    found[fd.stat().st_ino] = fd.stat().st_blocks * 512
    return found
