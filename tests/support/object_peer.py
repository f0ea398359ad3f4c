"""Processes that write and read objects in shared memory for as long as they live.

    python -m tests.support.object_peer write SEGMENT_FD PIPE_FD
    python -m tests.support.object_peer read SEGMENT_FD PIPE_FD

The writer tells in the pipe where each object is, and holds few of them. The reader looks at each, and at older ones
again; at the end of the pipe it says how many it found, how many were missing and how many were wrong.
"""

import os
import random
import sys
from collections import deque

import msgspec

from tests.support.shared_media import key_of, same, tensors_of
from tokenmill_engine.ipc.object_store import Lease, ObjectStore
from tokenmill_engine.ipc.shared_objects import SegmentReader
from tokenmill_engine.messages import SharedObject

_MOST_PIXELS = 40_000
_RECORD_BYTES = 128
"""Written and read whole, so that a writer's end leaves no piece of one."""
_NUM_HELD = 3
_NUM_OLD = 50


class Record(msgspec.Struct, array_like=True):
    number: int
    num_pixels: int
    shared: SharedObject


def write(segment: int, pipe: int) -> None:
    source = random.Random(os.getpid())
    store = ObjectStore(segment, 0, 1 << 30)
    held: deque[Lease] = deque(maxlen=_NUM_HELD)
    while True:
        number = source.randrange(20)
        num_pixels = _MOST_PIXELS * (number + 1) // 20
        lease = store.put(key_of(number), tensors_of(number, num_pixels))
        if lease is None:
            raise RuntimeError("three objects leave room for another")
        if len(held) == _NUM_HELD:
            held.popleft().release()
        held.append(lease)
        record = msgspec.msgpack.encode(Record(number, num_pixels, lease.shared))
        os.write(pipe, bytes([len(record)]) + record.ljust(_RECORD_BYTES - 1, b"\0"))


def read(segment: int, pipe: int) -> None:
    source = random.Random(os.getpid())
    decoder = msgspec.msgpack.Decoder(Record)
    reader = SegmentReader(segment)
    expected = {}
    old: deque[Record] = deque(maxlen=_NUM_OLD)
    counts = dict.fromkeys(("found", "missing", "wrong"), 0)
    _say("reading")
    while data := os.read(pipe, _RECORD_BYTES):
        old.append(decoder.decode(data[1 : 1 + data[0]]))
        for record in (old[-1], source.choice(old)):
            key = record.number, record.num_pixels
            if key not in expected:
                expected[key] = tensors_of(*key)
            found = reader.read(record.shared, key_of(record.number), expected[key])
            verdict = "missing" if found is None else "found" if same(found, expected[key]) else "wrong"
            counts[verdict] += 1
    _say(" ".join(map(str, counts.values())))


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3]))
