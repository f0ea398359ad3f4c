"""Memory of the images and videos that are being decoded and prepared: together they take at most so much."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from tokenmill_server.multimodal.asking import LOOK_UP_S, Check, always
from tokenmill_server.multimodal.errors import MediaError

Kind = Literal["image", "video"]

_VIDEOS_SHARE = 0.75


@dataclass(slots=True, eq=False)
class _Turn:
    """Who waits for memory."""

    kind: Kind
    num_bytes: int


class DecodingMemory:
    """Threads share it. What a thread holds it gives back when it is done with its image or video.

    They have their turns in order of arrival. Videos, which may take a minute, together get three quarters at most, and
    as long as images have no more than the last quarter, these wait for no video.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity`: bytes."""
        self._capacity = capacity
        self._used: dict[Kind, int] = {"image": 0, "video": 0}
        self._waiting: list[_Turn] = []
        self._changed = threading.Condition()

    def most(self, kind: Kind) -> int:
        """Bytes that one may have."""
        return self._capacity if kind == "image" else int(_VIDEOS_SHARE * self._capacity)

    @contextmanager
    def lease(self, kind: Kind = "image") -> Iterator["Lease"]:
        """For one image or video; nothing yet. What was taken is given back at the end."""
        lease = Lease(self, kind)
        try:
            yield lease
        finally:
            self._add(kind, -lease.num_bytes)

    def _take(self, kind: Kind, num_bytes: int, check: Check) -> None:
        turn = _Turn(kind, num_bytes)
        with self._changed:
            self._waiting.append(turn)
            try:
                while not self._may_go(turn):
                    self._changed.wait(LOOK_UP_S)
                    check()
                self._used[kind] += num_bytes
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()

    def _may_go(self, turn: _Turn) -> bool:
        if next(each for each in self._waiting if each.kind == turn.kind) is not turn:
            return False
        if not self._has_room(turn.kind, turn.num_bytes):
            return False
        is_first = self._waiting[0] is turn
        if turn.kind == "video":
            return is_first
        return is_first or self._used["image"] + turn.num_bytes <= self._capacity - self.most("video")

    def _has_room(self, kind: Kind, num_bytes: int) -> bool:
        return sum(self._used.values()) + num_bytes <= self._capacity and self._used[kind] + num_bytes <= self.most(
            kind
        )

    def _resize(self, kind: Kind, num_more: int) -> bool:
        with self._changed:
            if num_more > 0 and (self._waiting or not self._has_room(kind, num_more)):
                return False
            self._used[kind] += num_more
            self._changed.notify_all()
        return True

    def _add(self, kind: Kind, num_bytes: int) -> None:
        with self._changed:
            self._used[kind] += num_bytes
            self._changed.notify_all()


class Lease:
    """What one image or video takes. Used by one thread."""

    def __init__(self, memory: DecodingMemory, kind: Kind) -> None:
        self._memory, self._kind = memory, kind
        self.num_bytes = 0

    def take(self, num_bytes: int, check: Check = always) -> None:
        """Waits until there is so much. Once: who held some and waited for more could wait for ever.

        Raises MediaError for more than one may have, and what `check` does.
        """
        if self.num_bytes:
            raise RuntimeError("an image takes its memory at once")
        self._check(num_bytes)
        self._memory._take(self._kind, num_bytes, check)
        self.num_bytes = num_bytes

    def resize(self, num_bytes: int) -> bool:
        """Gives back what is more than `num_bytes`, or takes what is missing; False if that is not there at once.

        Raises MediaError for more than one may have.
        """
        self._check(num_bytes)
        if not self._memory._resize(self._kind, num_bytes - self.num_bytes):
            return False
        self.num_bytes = num_bytes
        return True

    def _check(self, num_bytes: int) -> None:
        most = self._memory.most(self._kind)
        if num_bytes > most:
            raise MediaError(
                f"the {self._kind} takes about {-(-num_bytes // 2**20)} MiB of memory to decode, more than the "
                f"{most // 2**20} MiB that --max-media-memory leaves to one"
            )
