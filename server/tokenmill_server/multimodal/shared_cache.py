"""A cache of prepared media in memory that engine cores and their workers read.

Keys are here, tensors there; a request says where its tensors are, and holds them there until it ends. What finds no
place travels with its request. What went between being found and being sent is missed by the engine core, and is
prepared and sent again.
"""

import threading
import weakref
from dataclasses import replace

from tokenmill_engine.ipc.object_store import ObjectStore
from tokenmill_server.multimodal.items import PreparedItem


class SharedCache:
    """A `ProcessorCache`. Of what is in the `store` it has only what the store notes."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._in_hand: weakref.WeakValueDictionary[bytes, PreparedItem] = weakref.WeakValueDictionary()
        """Those that somebody has who prepares a request with them, also where they found no place."""
        self._lock = threading.Lock()

    def find(self, key: bytes) -> PreparedItem | None:
        item: PreparedItem | None = self._store.note(key)
        if item is not None:
            return item
        with self._lock:
            return self._in_hand.get(key)

    def keep(self, item: PreparedItem) -> None:
        lease = self._store.put(item.key, item.tensors, item.without_tensors())
        if lease is not None:
            lease.release()

    def add(self, item: PreparedItem) -> None:
        with self._lock:
            self._in_hand[item.key] = item

    def with_tensors(self, key: bytes) -> PreparedItem | None:
        item = self.find(key)
        if item is None or item.tensors:
            return item
        lease = self._store.acquire(key)
        if lease is None:
            return None
        tensors = lease.read() or {}
        lease.release()
        return replace(item, tensors=tensors)

    def outgoing(self, item: PreparedItem, shares: bool = False) -> PreparedItem:
        if item.tensors and not shares:
            return item
        lease = self._store.acquire(item.key)
        if lease is None:
            return item
        return replace(item, tensors=lease.tensors if shares else {}, lease=lease)

    def clear(self) -> None:
        """What is here does not depend on any engine core."""
