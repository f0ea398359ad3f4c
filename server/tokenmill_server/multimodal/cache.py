"""What an API server remembers of media that it has prepared, so that nothing is prepared or sent twice.

Only what is complete enters, and it stays true whatever becomes of the request that it was prepared for. Where the
tensors are in the engine core, an entry says that they were sent there: it may be wrong, if the engine core died or
refused the request, and then the engine core says so and they are sent again.
"""

import logging
import threading
import weakref
from collections import OrderedDict
from typing import Protocol

from tokenmill_engine.media_store import media_bytes
from tokenmill_server.multimodal.items import PreparedItem

logger = logging.getLogger(__name__)


class ProcessorCache(Protocol):
    """A cache of one API server. `find` and `with_tensors` may be called from any thread, `keep` is in that of
    preparation, the rest from the event loop."""

    def find(self, key: bytes) -> PreparedItem | None:
        """The item with this key, if it is known; without tensors if whoever computes has them."""

    def keep(self, item: PreparedItem) -> None:
        """`item` is completely prepared. May take long."""

    def add(self, item: PreparedItem) -> None:
        """Whoever else wants the item, of which `keep` was told, finds it from now on."""

    def with_tensors(self, key: bytes) -> PreparedItem | None:
        """The item with this key and its tensors, if they are in reach of this process. May take long."""

    def outgoing(self, item: PreparedItem, shares: bool = False) -> PreparedItem:
        """`item`, of a request that is being sent, as it travels: without the tensors that its receiver has. `shares`:
        the receiver reads the memory that this API server shares. If it does not, and the tensors are there alone, the
        item has a lease and no tensors: `with_tensors` has them."""

    def clear(self) -> None:
        """An engine core that this API server sent to is gone, and with it what it had."""


class _Lru:
    """Items by key, the latest used last, `capacity_bytes` of them at most. Not thread-safe."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._items: OrderedDict[bytes, tuple[PreparedItem, int]] = OrderedDict()
        self.num_bytes = 0
        self._has_warned = False

    def get(self, key: bytes) -> PreparedItem | None:
        found = self._items.get(key)
        if found is None:
            return None
        self._items.move_to_end(key)
        return found[0]

    def put(self, item: PreparedItem, num_bytes: int) -> None:
        """Others make room for it, unless it is too large for all of it."""
        if item.key in self._items:
            self._items.move_to_end(item.key)
            return
        if num_bytes > self._capacity:
            self._warn(item, num_bytes)
            return
        self.num_bytes += num_bytes
        while self.num_bytes > self._capacity:
            _, (_, freed) = self._items.popitem(last=False)
            self.num_bytes -= freed
        self._items[item.key] = (item, num_bytes)

    def clear(self) -> None:
        self._items.clear()
        self.num_bytes = 0

    def _warn(self, item: PreparedItem, num_bytes: int) -> None:
        """Once: where one comes, more do."""
        if not self._has_warned:
            logger.warning(
                "a prepared %s of %.1f MB is larger than the whole cache: it is served, and prepared again each time. "
                "--mm-processor-cache-gb makes room; further ones are not logged",
                item.kind,
                num_bytes / 1e6,
            )
        self._has_warned = True


class ItemCache:
    """Keys and tensors, both here: engine cores have only what their live requests need."""

    def __init__(self, capacity_bytes: int) -> None:
        self._lru = _Lru(capacity_bytes)
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._lru.num_bytes

    def find(self, key: bytes) -> PreparedItem | None:
        with self._lock:
            return self._lru.get(key)

    def add(self, item: PreparedItem) -> None:
        with self._lock:
            self._lru.put(item, media_bytes(item.tensors))

    def keep(self, item: PreparedItem) -> None:
        """Nothing takes long."""

    def with_tensors(self, key: bytes) -> PreparedItem | None:
        return self.find(key)

    def outgoing(self, item: PreparedItem, shares: bool = False) -> PreparedItem:
        return item

    def clear(self) -> None:
        """What is here does not depend on any engine core."""


class KeyCache:
    """Keys here, tensors in the one engine core that there is.

    An item is known as sent from when a request takes its tensors along. Before that, those who prepare a request
    with it are the only ones who have its tensors; as long as one of them does, it is found all the same.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._sent = _Lru(capacity_bytes)
        """Without tensors, and counted with them, since it is these that the engine core keeps."""
        self._in_hand: weakref.WeakValueDictionary[bytes, PreparedItem] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Of what is thought to be in the engine core."""
        return self._sent.num_bytes

    def find(self, key: bytes) -> PreparedItem | None:
        with self._lock:
            return self._sent.get(key) or self._in_hand.get(key)

    def add(self, item: PreparedItem) -> None:
        with self._lock:
            self._in_hand[item.key] = item

    def keep(self, item: PreparedItem) -> None:
        """Nothing takes long."""

    def with_tensors(self, key: bytes) -> PreparedItem | None:
        return self.find(key)

    def outgoing(self, item: PreparedItem, shares: bool = False) -> PreparedItem:
        with self._lock:
            if self._sent.get(item.key) is not None:
                return item.without_tensors()
            if item.tensors:
                self._sent.put(item.without_tensors(), media_bytes(item.tensors))
            return item

    def clear(self) -> None:
        with self._lock:
            self._sent.clear()
