"""The media of one request on their way to an engine core, and again if it lacks them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_engine.ipc.object_store import Lease
from tokenmill_engine.messages import MediaItem
from tokenmill_server.multimodal.items import PreparedItem
from tokenmill_server.multimodal.prepared import PreparedMedia

Again = Callable[[], Awaitable[PreparedItem]]


@dataclass(slots=True, frozen=True)
class LoadedItem:
    """One item of a request."""

    item: PreparedItem
    param: str
    """The field it came from."""
    again: Again | None
    """Prepares it once more, from what the client sent. None: it sent a name alone."""

    def piece(self, index: int) -> "LoadedItem":
        """What the engine takes of it."""
        if not self.item.parts:
            return self
        return LoadedItem(self.item.parts[index], self.param, self.again and partial(_piece, self.again, index))


async def _piece(again: Again, index: int) -> PreparedItem:
    return (await again()).parts[index]


class RequestSupply:
    """A `MediaSupply`. Tensors are let go of when they are sent; what they were made of, which is much smaller, when
    every sequence has had an answer."""

    def __init__(self, prepared: PreparedMedia, loaded: Sequence[LoadedItem], items: Sequence[MediaItem]) -> None:
        """`items`: where each of `loaded` stands in the prompt."""
        self._prepared = prepared
        self._loaded = list(loaded)
        self._leases: list[Lease] = []
        """On what is in shared memory: the engine may have to look at it again until the request has ended."""
        self.places = tuple(msgspec.structs.replace(item, tensors={}) for item in items)

    def outgoing(self, shares: bool = False) -> tuple[MediaItem, ...]:
        travelling: list[MediaItem] = []
        seen: set[bytes] = set()
        for loaded, place in zip(self._loaded, self.places, strict=True):
            item = self._prepared.outgoing(loaded.item, shares)
            if item.lease is not None:
                self._leases.append(item.lease)
                place = msgspec.structs.replace(place, tensors=item.tensors, shared=item.lease.shared)
            elif item.key not in seen:
                place = msgspec.structs.replace(place, tensors=item.tensors)
            travelling.append(place)
            seen.add(item.key)
        self._loaded = [
            LoadedItem(loaded.item.without_tensors(), loaded.param, loaded.again) for loaded in self._loaded
        ]
        return tuple(travelling)

    async def restored(self) -> tuple[MediaItem, ...]:
        loaded = list(self._loaded)  # whatever settles meanwhile
        if len(loaded) != len(self.places):
            raise RuntimeError("media are asked for again after every sequence had an answer")
        try:
            async with asyncio.TaskGroup() as group:  # if one fails, the others are given up
                tasks = [group.create_task(self._restore(each)) for each in loaded]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return tuple(
            msgspec.structs.replace(place, tensors=task.result().tensors)
            for place, task in zip(self.places, tasks, strict=True)
        )

    def settle(self) -> None:
        self._loaded.clear()

    def end(self) -> None:
        for lease in self._leases:
            lease.release()
        self._leases.clear()

    async def _restore(self, loaded: LoadedItem) -> PreparedItem:
        known = self._prepared.tensors_of(loaded.item)
        if known is not None:
            return known
        if loaded.again is None:
            raise InvalidRequestError(
                "nothing is kept under this uuid any more; send the media themselves along", loaded.param
            )
        item = await loaded.again()
        if item.key != loaded.item.key:
            raise RuntimeError("media became something else when they were prepared again")
        return item
