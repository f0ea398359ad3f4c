"""Messages from one process to several others through memory that they share: a ring of bytes, like a pipe of which
each reader gets everything.

The memory is anonymous and lives as long as somebody has it mapped, so no end of any process leaves it behind. Three
kinds of numbers say how far everybody is: the writer's position and each reader's, bytes since the beginning, each in a
cache line of its own and written by its owner alone, in one store. Data is written before the position that covers it.

Nobody waits in a loop. Who changes a position adds to an eventfd (of each reader, or the writer's) afterwards, always;
who finds nothing to do reads that eventfd, which blocks while it is 0, and then looks again. So no wake-up is lost: a
change before the look is seen, a change after it has made the eventfd readable. The dead do not wake anybody: who must
notice them adds to the same eventfds (`wake_up`), or is told otherwise.

A message is a frame: its length and its number, 8 bytes each, then the bytes, padded to 16. It may be longer than the
ring; the writer then waits for the slowest reader in between.
"""

import contextlib
import mmap
import os
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass

MAX_READERS = 511
_LINE_BYTES = 64
_HEADER_BYTES = (MAX_READERS + 1) * _LINE_BYTES
_LINE_WORDS = _LINE_BYTES // 8
_FRAME = struct.Struct("<QQ")
_GRAIN = _FRAME.size
"""Positions are multiples of it, so that a frame's head is never in two pieces."""

Message = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class RingFiles:
    """The descriptors of a ring, for the writer and for those who start readers. None is inheritable by itself."""

    memory: int
    wakes: tuple[int, ...]
    """One eventfd for each reader."""
    space: int
    """The writer's eventfd."""
    borrows_wake: bool = False
    """The reader's eventfd is somebody else's to close."""

    def of_reader(self, index: int) -> tuple[int, int, int]:
        """What `RingReader` takes, before the reader's number."""
        return self.memory, self.wakes[index], self.space

    def close(self) -> None:
        """Closes all of them; what is mapped stays."""
        for fd in (self.memory, self.space, *(() if self.borrows_wake else self.wakes)):
            os.close(fd)


def create_ring(num_readers: int, capacity: int, wake: int | None = None) -> RingFiles:
    """An empty ring of `capacity` bytes, a multiple of 16. The memory is taken when it is first used. `wake`: an
    eventfd that the only reader has already, for who reads several rings.

    Raises:
        OSError: there are too many open files.
        ValueError: there cannot be such a ring.
    """
    if not 1 <= num_readers <= MAX_READERS:
        raise ValueError(f"a ring has 1 to {MAX_READERS} readers, not {num_readers}")
    if capacity < 2 * _GRAIN or capacity % _GRAIN:
        raise ValueError(f"{capacity} bytes are no multiple of {_GRAIN}, or too few")
    with contextlib.ExitStack() as undo:

        def own(fd: int) -> int:
            undo.callback(os.close, fd)
            return fd

        memory = own(os.memfd_create("tokenmill-ring"))
        os.ftruncate(memory, _HEADER_BYTES + capacity)
        space = own(os.eventfd(0, os.EFD_CLOEXEC))
        wakes = [own(os.eventfd(0, os.EFD_CLOEXEC)) for _ in range(num_readers)] if wake is None else [wake]
        undo.pop_all()
    return RingFiles(memory, tuple(wakes), space, borrows_wake=wake is not None)


def wake_up(fd: int) -> None:
    """Let whoever waits on this eventfd look again."""
    os.eventfd_write(fd, 1)


def await_wake_up(fd: int) -> None:
    """Sleep until somebody has added to this eventfd since the last call. Signal handlers run meanwhile."""
    os.read(fd, 8)  # `os.eventfd_read` would fail after a signal


class _Memory:
    """The mapping: positions and data. Keeps no descriptor of the caller's."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        whole = memoryview(self._map)
        self.data = whole[_HEADER_BYTES:]
        self.capacity = len(self.data)
        self._positions = whole[:_HEADER_BYTES].cast("Q")
        self._barrier = threading.Lock()
        self._barrier.acquire()
        whole.release()

    def position(self, party: int) -> int:
        """Of the writer (0) or of reader `party - 1`. What it covers may be read afterwards."""
        position = self._positions[party * _LINE_WORDS]
        self._order()
        return position

    def set_position(self, party: int, position: int) -> None:
        """All that was written before is there for who sees the new position."""
        self._order()
        self._positions[party * _LINE_WORDS] = position

    def _order(self) -> None:
        """Processors may exchange loads and stores. On Arm these may pass the start of a locked section downwards and
        its end upwards, so it orders nothing; none passes an end and the next start, in this order."""
        self._barrier.release()
        self._barrier.acquire()

    def write(self, position: int, data: memoryview) -> None:
        start = position % self.capacity
        first = min(len(data), self.capacity - start)
        self.data[start : start + first] = data[:first]
        if first < len(data):
            self.data[: len(data) - first] = data[first:]

    def read(self, position: int, target: memoryview) -> None:
        start = position % self.capacity
        first = min(len(target), self.capacity - start)
        target[:first] = self.data[start : start + first]
        if first < len(target):
            target[first:] = self.data[: len(target) - first]

    def close(self) -> None:
        self.data.release()
        self._positions.release()
        self._map.close()


class RingWriter:
    """The only one that writes. The eventfds stay the caller's to close."""

    def __init__(self, memory: int, wakes: tuple[int, ...], space: int) -> None:
        self._memory = _Memory(memory)
        self._wakes = wakes
        self._space = space
        self._position = 0
        self._slowest = 0
        """At most the position of the slowest reader."""
        self._number = 0

    def send(self, message: Message, while_full: Callable[[], None] | None = None) -> None:
        """Write a message. Where the ring is full, `while_full` is called until it is not: it waits in some way, until
        the writer's eventfd was added to, and may raise to give up; then nothing can follow. None: wait for ever."""
        head = _FRAME.pack(len(message), self._number)
        self._number += 1
        for part in (head, message):
            self._put(memoryview(part), while_full or self.wait_for_space)
        self._publish()

    def wait_for_space(self) -> None:
        """Until a reader has read on since the last call."""
        await_wake_up(self._space)

    def close(self) -> None:
        """Unmap the memory."""
        self._memory.close()

    def _put(self, part: memoryview, while_full: Callable[[], None]) -> None:
        while part:
            free = self._free(len(part))
            if not free:
                self._publish()
                while_full()
                continue
            piece = part[:free]
            self._memory.write(self._position, piece)
            self._position += _padded(len(piece))
            part = part[free:]

    def _free(self, wanted: int) -> int:
        """Bytes that can be written, as far as they are wanted."""
        memory = self._memory
        if self._position + _padded(wanted) - self._slowest > memory.capacity:
            self._slowest = min(memory.position(1 + index) for index in range(len(self._wakes)))
        return memory.capacity - (self._position - self._slowest)

    def _publish(self) -> None:
        self._memory.set_position(0, self._position)
        for fd in self._wakes:
            wake_up(fd)


class RingReader:
    """Reader `index` of a ring. The eventfds stay the caller's to close."""

    def __init__(self, memory: int, wake: int, space: int, index: int = 0) -> None:
        self._memory = _Memory(memory)
        self._wake = wake
        self._space = space
        self._party = 1 + index
        self._position = 0
        self._number = 0
        self._message: bytearray | None = None
        """What has begun to arrive, of its full length."""
        self._filled = 0

    def receive(self) -> bytearray:
        """Wait for the next message."""
        while (message := self.take()) is None:
            self.wait()
        return message

    def wait(self) -> None:
        """Until something was written since the last call, or somebody wakes us up."""
        await_wake_up(self._wake)

    def take(self) -> bytearray | None:
        """The next message, if all of it is there. What is there of a longer one makes room for its rest.

        Raises:
            RuntimeError: what is in the ring is not what its writer writes.
        """
        end = self._memory.position(0)
        if end == self._position:
            return None
        message = self._message if self._message is not None else self._begin()
        rest = len(message) - self._filled
        count = min(end - self._position, _padded(rest))
        with memoryview(message) as view:
            self._memory.read(self._position, view[self._filled : self._filled + min(count, rest)])
        self._filled += min(count, rest)
        self._position += count
        self._memory.set_position(self._party, self._position)
        wake_up(self._space)
        if self._filled < len(message):
            return None
        self._message = None
        return message

    def close(self) -> None:
        """Unmap the memory."""
        self._memory.close()

    def _begin(self) -> bytearray:
        """Read a frame's head."""
        length, number = _FRAME.unpack_from(self._memory.data, self._position % self._memory.capacity)
        if number != self._number:
            raise RuntimeError(f"message {self._number} was expected in the ring, not {number}")
        self._position += _FRAME.size
        self._number += 1
        self._filled = 0
        self._message = bytearray(length)
        return self._message


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _GRAIN) * _GRAIN
