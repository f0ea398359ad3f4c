"""The writer of a segment of prepared media: what is kept, and for how long.

An object stays for as long as somebody has a lease on it, and after that until its place is needed, least recently used
first. What finds no place is not kept, which is nobody's fault: its bytes travel as if nothing were shared. Threads
share a store; copying happens beside its lock.
"""

import itertools
import logging
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill_engine.ipc.arena import Arena, rounded
from tokenmill_engine.ipc.shared_objects import (
    FIRST_OBJECT,
    MAGIC,
    OBJECT_HEAD,
    SEGMENT_HEAD,
    SegmentReader,
    object_head,
    places_of,
    without_data,
)
from tokenmill_engine.messages import MediaTensor, SharedObject

logger = logging.getLogger(__name__)

_NO_HEAD = bytes(OBJECT_HEAD.size)


@dataclass(slots=True, eq=False)
class _Object:
    key: bytes
    start: int
    """In the arena."""
    size: int
    shared: SharedObject
    tensors: dict[str, MediaTensor]
    """Without their bytes."""
    note: Any
    num_leases: int = 1
    is_whole: bool = False
    """All bytes are there."""


class Lease:
    """Keeps an object where it is, until `release`, or until nobody has the lease any more."""

    def __init__(self, store: "ObjectStore", kept: _Object) -> None:
        self._store = store
        self._object: _Object | None = kept
        self.key = kept.key
        self.shared = kept.shared
        self.tensors = kept.tensors
        """Without their bytes."""

    def read(self) -> dict[str, MediaTensor] | None:
        """The tensors with their bytes, for an engine core that does not share this memory. None only if the lease is
        released."""
        return self._store.reader.read(self.shared, self.key, self.tensors)

    def release(self) -> None:
        """The object may go. May be called again."""
        kept, self._object = self._object, None
        if kept is not None:
            self._store._let_go(kept)

    def __del__(self) -> None:
        # Maybe in the middle of what the store does: it looks there when it does the next thing.
        if self._object is not None:
            self._store._dropped.append(self._object)


class ObjectStore:
    """The objects of one segment. There is one such store at a time: it makes everything that an earlier one wrote
    unreadable."""

    def __init__(self, fd: int, segment: int, max_object_bytes: int, overhead_bytes: int = 0) -> None:
        """`fd`: of a segment, the caller's to close; this keeps a copy. Readers know the segment as number `segment`.
        Each object takes the place of `overhead_bytes` more: what remembering it costs elsewhere.

        Raises:
            OSError: there is no memory for its first page.
        """
        # A number that is closed while a thread writes may be another file's the next moment.
        self._fd = os.dup(fd)
        weakref.finalize(self, os.close, self._fd)
        self._segment = segment
        self._max_object_bytes = max_object_bytes
        self._overhead_bytes = overhead_bytes
        self._writer = os.urandom(8)
        self._num_written = 0
        self._arena = Arena(os.fstat(fd).st_size - FIRST_OBJECT)
        self._objects: dict[bytes, _Object] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        """Objects without leases, least recently used first."""
        self._dropped: deque[_Object] = deque()
        """One for each lease that was dropped without being released."""
        self._changed = threading.Condition()
        self._has_warned = False
        self.reader = SegmentReader(self._fd)
        os.pwrite(self._fd, SEGMENT_HEAD.pack(MAGIC, self._writer), 0)

    @property
    def capacity(self) -> int:
        """Bytes for objects, their heads included."""
        return self._arena.capacity

    @property
    def num_objects(self) -> int:
        """Those that are kept."""
        return len(self._objects)

    @property
    def num_leased(self) -> int:
        """Of those, what somebody has a lease on."""
        with self._changed:
            self._take_dropped()
            return len(self._objects) - len(self._idle)

    def __contains__(self, key: bytes) -> bool:
        return key in self._objects

    def acquire(self, key: bytes) -> Lease | None:
        """A lease on an object, if it is there. Does not wait."""
        with self._changed:
            found = self._objects.get(key)
            return self._lease(found) if found is not None and found.is_whole else None

    def note(self, key: bytes) -> Any:
        """What was noted with an object, if it is there, which counts as a use of it; else None. Does not wait."""
        with self._changed:
            found = self._objects.get(key)
            if found is None or not found.is_whole:
                return None
            if key in self._idle:
                self._idle.move_to_end(key)
            return found.note

    def put(self, key: bytes, tensors: Mapping[str, MediaTensor], note: Any = None) -> Lease | None:
        """Keeps tensors, and a `note`, under the 32 bytes of a `key`, for which others make room; or finds them here
        already, perhaps after waiting for another thread that writes them. None: they are larger than an object may be,
        what is leased leaves no room, or the machine has no memory."""
        _, num_bytes = places_of(tensors)
        with self._changed:
            self._take_dropped()
            self._changed.wait_for(lambda: key not in self._objects or self._objects[key].is_whole)
            if key in self._objects:
                return self._lease(self._objects[key])
            kept = self._place(key, tensors, num_bytes, note)
        if kept is None:
            return None
        try:
            self._write(kept, tensors)
        except OSError as error:
            self._fail(kept, error)
            return None
        except BaseException:
            self._drop_failed(kept)
            raise
        with self._changed:
            kept.is_whole = True
            self._changed.notify_all()
        return Lease(self, kept)

    def clear(self) -> None:
        """Drops what nobody has a lease on."""
        with self._changed:
            self._take_dropped()
            while self._idle:
                self._evict(next(iter(self._idle)))

    def check_invariants(self) -> None:
        """Raises AssertionError if objects, leases and places contradict each other."""
        with self._changed:
            taken = sorted((each.start, each.size) for each in self._objects.values())
            free = self._arena.free_ranges()
            ranges = sorted(taken + free)
            ends = [start + size for start, size in ranges]
            assert [start for start, _ in ranges] == [0, *ends[:-1]][: len(ranges)]
            assert not ranges or ends[-1] == self._arena.capacity
            assert not any(one + size == other for (one, size), (other, _) in itertools.pairwise(free))
            assert set(self._idle) == {key for key, each in self._objects.items() if each.num_leases == 0}
            assert all(each.num_leases >= 0 and each.key == key for key, each in self._objects.items())

    # --- with the lock --------------------------------------------------------------------------------------------

    def _lease(self, kept: _Object) -> Lease:
        if kept.num_leases == 0:
            del self._idle[kept.key]
        kept.num_leases += 1
        return Lease(self, kept)

    def _take_dropped(self) -> None:
        while self._dropped:
            self._end_lease(self._dropped.popleft())

    def _end_lease(self, kept: _Object) -> None:
        kept.num_leases -= 1
        if kept.num_leases == 0:
            self._idle[kept.key] = None

    def _place(self, key: bytes, tensors: Mapping[str, MediaTensor], num_bytes: int, note: Any) -> _Object | None:
        """A new object, leased, whose bytes are not there yet."""
        size = rounded(OBJECT_HEAD.size + num_bytes + self._overhead_bytes)
        if num_bytes > self._max_object_bytes:
            return None
        start = self._arena.take(size)
        if start is None and size > self._largest_room():
            return None
        while start is None:
            self._evict(next(iter(self._idle)))
            start = self._arena.take(size)
        stamp = self._writer + self._num_written.to_bytes(8, "little")
        self._num_written += 1
        shared = SharedObject(self._segment, FIRST_OBJECT + start, num_bytes, stamp)
        kept = self._objects[key] = _Object(key, start, size, shared, without_data(tensors), note)
        return kept

    def _largest_room(self) -> int:
        """Bytes of the largest range that there would be if nothing idle were kept."""
        leased = sorted((each.start, each.size) for each in self._objects.values() if each.num_leases)
        ends = [0, *(start + size for start, size in leased)]
        starts = [*(start for start, _ in leased), self._arena.capacity]
        return max(start - end for start, end in zip(starts, ends, strict=True))

    def _evict(self, key: bytes) -> None:
        """The head goes before anything else is written to the place of an object."""
        del self._idle[key]
        gone = self._objects.pop(key)
        os.pwrite(self._fd, _NO_HEAD, gone.shared.offset)
        self._arena.give_back(gone.start, gone.size)

    # --- beside the lock ------------------------------------------------------------------------------------------

    def _write(self, kept: _Object, tensors: Mapping[str, MediaTensor]) -> None:
        shared = kept.shared
        places, _ = places_of(tensors)
        first = shared.offset + OBJECT_HEAD.size
        for name, tensor in tensors.items():
            self._fill(memoryview(tensor.data).cast("B"), first + places[name][0])
        self._fill(memoryview(object_head(shared, kept.key)), shared.offset)

    def _fill(self, data: memoryview, offset: int) -> None:
        while data:
            count = os.pwrite(self._fd, data, offset)
            data, offset = data[count:], offset + count

    def _fail(self, kept: _Object, error: OSError) -> None:
        self._drop_failed(kept)
        if not self._has_warned:
            self._has_warned = True
            logger.warning("no memory for prepared media, which travel to engine cores by themselves now: %s", error)

    def _drop_failed(self, kept: _Object) -> None:
        with self._changed:
            del self._objects[kept.key]
            self._arena.give_back(kept.start, kept.size)
            self._changed.notify_all()

    def _let_go(self, kept: _Object) -> None:
        with self._changed:
            self._end_lease(kept)
