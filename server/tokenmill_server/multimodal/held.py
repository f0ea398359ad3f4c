"""Bytes of media that the requests of one API server hold while they wait: files until every sequence has had an
answer, prepared media until they are sent. Beyond a limit requests are refused: nothing else bounds how many wait.

What is refused counts no more at once, though its memory is free only when all that works for it has heard so: of many
whose files come in at the same time, the first to ask for too much must make room for the others, or none is left.
"""

import threading
from collections import deque

from tokenmill_engine.errors import OverloadedError
from tokenmill_engine.media_store import media_bytes
from tokenmill_server.multimodal.items import PreparedItem


class HeldMedia:
    """Of all requests. Used from any thread."""

    def __init__(self, max_bytes: int | None) -> None:
        """None: there is no limit."""
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._items: dict[int, tuple[int, int]] = {}
        """By the identity of its tensors, how many requests hold an item, and its bytes: which they share."""
        self._gone: deque[_Held] = deque()
        """Of requests that ended without a word. They may do so at any moment, also while the lock is held."""
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        with self._lock:
            self._settle()
            return self._num_bytes

    def holding(self) -> "Holding":
        """For one request; nothing yet."""
        return Holding(self)

    def leave(self, held: "_Held") -> None:
        """Nothing of it is held any more. Never blocks."""
        self._gone.append(held)

    def take(self, held: "_Held", num_bytes: int) -> None:
        """Raises OverloadedError if others hold so much that there is no room, now and from now on. What one request
        alone holds is bounded elsewhere."""
        with self._lock:
            self._settle()
            self._check(held, num_bytes)
            held.num_file_bytes += num_bytes
            self._num_bytes += num_bytes

    def give(self, held: "_Held", num_bytes: int) -> None:
        with self._lock:
            if not held.is_refused:
                held.num_file_bytes -= num_bytes
                self._num_bytes -= num_bytes

    def take_item(self, held: "_Held", item: PreparedItem) -> None:
        """As `take`, the bytes of an item's tensors."""
        with self._lock:
            self._settle()
            for piece in item.pieces:
                identity = id(piece.tensors)
                if not piece.tensors or identity in held.items:
                    continue
                num_bytes = media_bytes(piece.tensors)
                num_holders, _ = self._items.get(identity, (0, num_bytes))
                if num_holders == 0:
                    self._check(held, num_bytes)
                    self._num_bytes += num_bytes
                self._items[identity] = (num_holders + 1, num_bytes)
                held.items[identity] = num_bytes

    def give_items(self, held: "_Held") -> None:
        with self._lock:
            self._drop_items(held)

    def _check(self, held: "_Held", num_bytes: int) -> None:
        if self._max_bytes is None:
            return
        is_too_much = self._num_bytes + num_bytes > self._max_bytes
        if is_too_much and self._num_bytes > held.num_file_bytes + sum(held.items.values()):
            held.is_refused = True
            self._drop(held)
        if held.is_refused:
            raise OverloadedError(
                f"the images and videos of other requests take the {self._max_bytes // 2**20} MiB that "
                "--max-media-memory leaves to those that wait; send it again later"
            )

    def _settle(self) -> None:
        while self._gone:
            self._drop(self._gone.popleft())

    def _drop(self, held: "_Held") -> None:
        self._num_bytes -= held.num_file_bytes
        held.num_file_bytes = 0
        self._drop_items(held)

    def _drop_items(self, held: "_Held") -> None:
        for identity in held.items:
            num_holders, num_bytes = self._items.pop(identity)
            if num_holders > 1:
                self._items[identity] = (num_holders - 1, num_bytes)
            else:
                self._num_bytes -= num_bytes
        held.items.clear()


class Holding:
    """What one request holds; at the latest until nobody has this any more."""

    def __init__(self, media: HeldMedia) -> None:
        self._media = media
        self._held = _Held()

    def take(self, num_bytes: int) -> None:
        """Of files. Raises OverloadedError if there is no room for them."""
        self._media.take(self._held, num_bytes)

    def give(self, num_bytes: int) -> None:
        """Of files."""
        self._media.give(self._held, num_bytes)

    def take_item(self, item: PreparedItem) -> None:
        """Raises OverloadedError if there is no room for its tensors."""
        self._media.take_item(self._held, item)

    def give_items(self) -> None:
        """All tensors are sent."""
        self._media.give_items(self._held)

    def release(self) -> None:
        """Nothing is held any more. May be called again."""
        held, self._held = self._held, _Held()
        self._media.leave(held)

    def __del__(self) -> None:
        self._media.leave(self._held)


class _Held:
    """The bytes of one request."""

    __slots__ = ("is_refused", "items", "num_file_bytes")

    def __init__(self) -> None:
        self.is_refused = False
        self.num_file_bytes = 0
        self.items: dict[int, int] = {}
        """Bytes of items, by the identity of their tensors."""
