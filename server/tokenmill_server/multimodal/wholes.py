"""Which items belong together: the groups of frames of a video, which caches know one by one."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from tokenmill_server.multimodal.items import PreparedItem

_PART_BYTES = 512
"""What remembering takes that a part belongs to an item."""


class Wholes:
    """The latest items with parts, without tensors. Thread-safe."""

    def __init__(self, capacity_bytes: int) -> None:
        self._max_parts = capacity_bytes // _PART_BYTES
        self._num_parts = 0
        self._items: OrderedDict[bytes, PreparedItem] = OrderedDict()
        self._lock = threading.Lock()

    def remember(self, item: PreparedItem) -> None:
        """`item` has parts."""
        with self._lock:
            if item.key in self._items:
                self._items.move_to_end(item.key)
                return
            self._items[item.key] = item.without_tensors()
            self._num_parts += len(item.parts)
            while self._num_parts > self._max_parts:
                _, forgotten = self._items.popitem(last=False)
                self._num_parts -= len(forgotten.parts)

    def find(self, key: bytes, find_part: Callable[[bytes], PreparedItem | None]) -> PreparedItem | None:
        """The item with this key, if it is remembered and each of its parts is found."""
        with self._lock:
            item = self._items.get(key)
        if item is None:
            return None
        parts = [find_part(part.key) for part in item.parts]
        known = tuple(part for part in parts if part is not None)
        return replace(item, parts=known) if len(known) == len(parts) else None
