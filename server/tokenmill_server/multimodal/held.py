"""Bytes of media that the open requests of one API server hold: files until every sequence has had an answer, prepared
media until the request ends, since an engine core has what it was sent for as long. Beyond a limit requests are
refused, or wait before they begin: nothing else bounds how many there are, here and in the queues of engine cores.

What is refused counts no more at once, though its memory is free only when all that works for it has heard so: of many
whose files come in at the same time, the first to ask for too much must make room for the others, or none is left.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Iterable

from tokenmill_engine.errors import OverloadedError
from tokenmill_engine.media_store import media_bytes
from tokenmill_server.multimodal.items import PreparedItem

_LOOK_S = 0.02
"""How often who waits for room looks again: what an object held is given back without a word."""


class HeldMedia:
    """Of all requests. Used from any thread."""

    def __init__(self, max_bytes: int, *, refuses: bool = True) -> None:
        """`refuses`: what is beyond `max_bytes` is refused; else whoever begins something asks for `room` before."""
        self._max_bytes = max_bytes
        self._refuses = refuses
        self._num_bytes = 0
        self._items: dict[int | bytes, tuple[int, int]] = {}
        """How many requests hold an item, and its bytes, which they share: by the identity of its tensors, and by its
        key once they are sent, since an engine core has each key once."""
        self._gone: deque[_Held] = deque()
        """Of requests that ended without a word. They may do so at any moment, also while the lock is held."""
        self._lock = threading.Lock()
        self._next = asyncio.Lock()

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
                if identity not in self._items:
                    self._check(held, num_bytes)
                self._add_item(held, identity, num_bytes)

    def send_items(self, held: "_Held", sent: Iterable[PreparedItem]) -> None:
        """`sent`, pieces with tensors of their own, are with an engine core now, and no others anywhere."""
        with self._lock:
            self._drop_items(held)
            for piece in () if held.is_refused else sent:
                num_bytes = media_bytes(piece.tensors)
                if piece.key not in held.items:
                    self._add_item(held, piece.key, num_bytes)

    async def room(self) -> None:
        """Waits until less than all is held. Who comes first goes first: what later ones hold may be kept for as long
        as an earlier one waits."""
        async with self._next:
            while self.num_bytes >= self._max_bytes:
                await asyncio.sleep(_LOOK_S)

    def _add_item(self, held: "_Held", name: int | bytes, num_bytes: int) -> None:
        num_holders, _ = self._items.get(name, (0, num_bytes))
        if num_holders == 0:
            self._num_bytes += num_bytes
        self._items[name] = (num_holders + 1, num_bytes)
        held.items[name] = num_bytes

    def _check(self, held: "_Held", num_bytes: int) -> None:
        if not self._refuses:
            return
        is_too_much = self._num_bytes + num_bytes > self._max_bytes
        if is_too_much and self._num_bytes > held.num_file_bytes + sum(held.items.values()):
            held.is_refused = True
            self._drop(held)
        if held.is_refused:
            raise OverloadedError(
                f"the images and videos of other requests take the {self._max_bytes // 2**20} MiB that "
                "--max-media-memory leaves to them all; send it again later"
            )

    def _settle(self) -> None:
        while self._gone:
            self._drop(self._gone.popleft())

    def _drop(self, held: "_Held") -> None:
        self._num_bytes -= held.num_file_bytes
        held.num_file_bytes = 0
        self._drop_items(held)

    def _drop_items(self, held: "_Held") -> None:
        for name in held.items:
            num_holders, num_bytes = self._items.pop(name)
            if num_holders > 1:
                self._items[name] = (num_holders - 1, num_bytes)
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

    def send_items(self, sent: Iterable[PreparedItem]) -> None:
        """All tensors are let go of here. An engine core has those of `sent` until the request ends."""
        self._media.send_items(self._held, sent)

    def give_files(self) -> None:
        """No files are held any more."""
        self._media.give(self._held, self._held.num_file_bytes)

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
        self.items: dict[int | bytes, int] = {}
        """Bytes of items, by the identity of their tensors, or by their keys."""
