"""The tensors of media in an engine core: each once, whoever asks about it, by the key that names its content.

A front end that has sent an item once may leave its tensors out. Whether they are here is not its business to know: a
request whose tensors are not is answered with `MediaMissing`, and comes again with all of them. Knows nothing of
requests but their ids, nor of what the tensors mean. Torch-free.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tokenmill_engine.messages import MediaItem, MediaTensor

ITEM_OVERHEAD_BYTES = 2048
"""What an item costs beside its tensors, in all processes that remember it: keys, objects, their places in tables."""

Tensors = Mapping[str, MediaTensor]


def media_bytes(tensors: Tensors) -> int:
    """What remembering an item with these tensors costs. Caches in API servers and in engine cores count alike."""
    return ITEM_OVERHEAD_BYTES + sum(memoryview(tensor.data).nbytes for tensor in tensors.values())


@dataclass(slots=True)
class _Entry:
    tensors: dict[str, MediaTensor]
    num_bytes: int
    num_holders: int = 0


class MediaStore:
    """Tensors that requests hold, and behind them idle ones as far as there is room.

    All of them together take `capacity_bytes` at most, unless those that are held alone take more: then there is no
    idle one. The idle ones that came with the oldest requests go first. One thread uses it.
    """

    def __init__(self, capacity_bytes: int = 0) -> None:
        self._capacity = capacity_bytes
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        """By key, those of the latest requests last."""
        self._held: dict[int, tuple[bytes, ...]] = {}
        """Keys by the request that holds them; one that has an item twice holds it twice."""
        self.num_bytes = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def complete(self, items: Sequence[MediaItem]) -> tuple[MediaItem, ...] | None:
        """`items` with tensors in each: those that came without, and those that are here already, get the ones from
        here. None if some are nowhere to be had. Those in shared memory are no business of this store. Changes nothing:
        what came is not checked yet."""
        here: dict[bytes, dict[str, MediaTensor]] = {}
        for item in items:
            entry = self._entries.get(item.key)
            if entry is not None:
                here[item.key] = entry.tensors
            elif item.tensors and item.shared is None:
                here.setdefault(item.key, item.tensors)
        completed = []
        for item in items:
            if item.shared is not None:
                completed.append(item)
                continue
            tensors = here.get(item.key)
            if tensors is None:
                return None
            # A key that was given to two contents is somebody's mistake; each then keeps what it came with.
            takes_ours = tensors is not item.tensors and (not item.tensors or _is_alike(item.tensors, tensors))
            completed.append(msgspec.structs.replace(item, tensors=tensors) if takes_ours else item)
        return tuple(completed)

    def hold(self, request_id: int, items: Sequence[MediaItem]) -> None:
        """The request, which is new and has been found right, needs the tensors of `items` (as `complete` gave them)
        until it is released. From now on others may leave them out."""
        items = [item for item in items if item.shared is None]
        if not items:
            return
        for item in items:
            entry = self._entries.get(item.key)
            if entry is None:
                entry = self._entries[item.key] = _Entry(item.tensors, media_bytes(item.tensors))
                self.num_bytes += entry.num_bytes
            entry.num_holders += 1
            self._entries.move_to_end(item.key)
        self._held[request_id] = tuple(item.key for item in items)
        self._evict()

    def release(self, request_id: int) -> None:
        """The request has ended. Nothing happens for one that holds nothing."""
        keys = self._held.pop(request_id, ())
        for key in keys:
            self._entries[key].num_holders -= 1
        if keys:
            self._evict()

    def check_invariants(self) -> None:
        """Raises AssertionError if counts and sizes are not those of what is here."""
        counts = dict.fromkeys(self._entries, 0)
        for keys in self._held.values():
            for key in keys:
                counts[key] += 1
        assert counts == {key: entry.num_holders for key, entry in self._entries.items()}
        assert self.num_bytes == sum(media_bytes(entry.tensors) for entry in self._entries.values())
        assert self.num_bytes <= self._capacity or all(counts.values())

    def _evict(self) -> None:
        excess, victims = self.num_bytes - self._capacity, []
        for key, entry in self._entries.items():
            if excess <= 0:
                break
            if entry.num_holders == 0:
                victims.append(key)
                excess -= entry.num_bytes
        for key in victims:
            self.num_bytes -= self._entries.pop(key).num_bytes


def _is_alike(first: Tensors, second: Tensors) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and first[name].shape == second[name].shape for name in first
    )
