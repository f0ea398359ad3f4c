"""The media of one request on their way to an engine core, and again if it lacks them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_engine.ipc.object_store import Lease
from tokenmill_engine.messages import MediaItem
from tokenmill_server.multimodal.failures import together
from tokenmill_server.multimodal.held import Holding
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
    """A `MediaSupply`. Tensors are let go of when they are sent, though they count until the request ends; what they
    were made of, which is much smaller, when every sequence has had an answer."""

    def __init__(
        self,
        prepared: PreparedMedia,
        loaded: Sequence[LoadedItem],
        items: Sequence[MediaItem],
        holding: Holding | None = None,
    ) -> None:
        """`items`: where each of `loaded` stands in the prompt. `holding`: what `loaded` takes."""
        self._holding = holding
        self._prepared = prepared
        self._loaded = list(loaded)
        self._leases: list[Lease] = []
        """On what is in shared memory: the engine may have to look at it again until the request has ended."""
        self._must_read = False
        """The engine does not look at that: it has to be read for it."""
        self.places = tuple(msgspec.structs.replace(item, tensors={}) for item in items)

    def outgoing(self, shares: bool = False) -> tuple[MediaItem, ...] | None:
        items = [self._prepared.outgoing(loaded.item, shares) for loaded in self._loaded]
        self._leases += [item.lease for item in items if item.lease is not None]
        self._must_read = not shares and bool(self._leases)
        if self._must_read:
            return None
        self._forget_tensors(items)
        return self._travelling(items)

    def _travelling(self, items: Sequence[PreparedItem]) -> tuple[MediaItem, ...]:
        """In the prompt; what is not in shared memory has its tensors once."""
        travelling: list[MediaItem] = []
        seen: set[bytes] = set()
        for item, place in zip(items, self.places, strict=True):
            if item.lease is not None:
                place = msgspec.structs.replace(place, tensors=item.tensors, shared=item.lease.shared)
            elif item.key not in seen:
                place = msgspec.structs.replace(place, tensors=item.tensors)
            travelling.append(place)
            seen.add(item.key)
        return tuple(travelling)

    def _forget_tensors(self, sent: Iterable[PreparedItem]) -> None:
        self._loaded = [
            LoadedItem(loaded.item.without_tensors(), loaded.param, loaded.again) for loaded in self._loaded
        ]
        if self._holding is not None:
            self._holding.send_items(item for item in sent if item.tensors and item.lease is None)

    async def restored(self) -> tuple[MediaItem, ...]:
        loaded = list(self._loaded)  # whatever settles meanwhile
        if len(loaded) != len(self.places):
            raise RuntimeError("media are asked for again after every sequence had an answer")
        distinct = {each.item.key: each for each in reversed(loaded)}
        restored = dict(zip(distinct, await together(map(self._restore, distinct.values())), strict=True))
        self._forget_tensors(restored.values())
        if self._must_read:
            self._give_shared()
        return self._travelling([restored[each.item.key] for each in loaded])

    def settle(self) -> None:
        self._loaded.clear()
        if self._holding is not None:
            self._holding.give_files()

    def end(self) -> None:
        self.settle()
        if self._holding is not None:
            self._holding.release()
        self._give_shared()

    def _give_shared(self) -> None:
        for lease in self._leases:
            lease.release()
        self._leases.clear()

    async def _restore(self, loaded: LoadedItem) -> PreparedItem:
        known = await asyncio.to_thread(self._prepared.tensors_of, loaded.item)
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
