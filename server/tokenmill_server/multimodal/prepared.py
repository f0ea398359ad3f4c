"""All prepared media of one process: prepared once, named, remembered, and sent once.

Joins the cache with the names that lead to its entries, and with what is being prepared at the moment. Knows nothing of
how media are fetched, decoded or prepared, nor of which kinds there are.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tokenmill_engine.errors import ConfigError
from tokenmill_engine.ipc.object_store import ObjectStore
from tokenmill_server.multimodal.asking import Admit, Asking, Check, NobodyHasRoomError
from tokenmill_server.multimodal.cache import ItemCache, KeyCache, ProcessorCache
from tokenmill_server.multimodal.flights import Flights, Waiter
from tokenmill_server.multimodal.items import PreparedItem
from tokenmill_server.multimodal.names import AmbiguousNameError, MediaNames
from tokenmill_server.multimodal.placement import CachePlacement, Placement
from tokenmill_server.multimodal.shared_cache import SharedCache
from tokenmill_server.multimodal.wholes import Wholes

T = TypeVar("T")

Prepare = Callable[[Asking], PreparedItem]
"""Decodes, tells how many tokens it will be, looks whether the key is known already, and else prepares. Takes long and
runs in a thread."""
InThread = Callable[[Callable[[], T]], Awaitable[T]]


class UnknownMediaError(Exception):
    """A client named media that it did not send, and nobody knows what they are. The text says why."""


class PreparedMedia:
    """Used from the event loop alone."""

    def __init__(
        self,
        placement: CachePlacement,
        on_lookup: Callable[[bool], None] | None = None,
        store: ObjectStore | None = None,
    ) -> None:
        """`on_lookup` is called for each item that was asked for, with whether it was known. `store`: where tensors are
        shared, if the placement says that they are."""
        self._cache = _make_cache(placement, store)
        self._num_caches = placement.num_caches
        self._names = MediaNames(placement.names_bytes // 2)
        self._wholes = Wholes(placement.names_bytes // 2)
        self._flights = Flights()
        self._on_lookup = on_lookup or _ignore

    @property
    def is_caching(self) -> bool:
        """Whether anything is remembered; else names lead nowhere."""
        return self._cache is not None

    def find(self, name: bytes, waiter: Waiter) -> PreparedItem | None:
        """The item that a file of this name became, if it is still known. Raises what `waiter` does."""
        try:
            return self._found(name, waiter)
        except AmbiguousNameError:
            return None

    def find_given(self, name: bytes, waiter: Waiter) -> PreparedItem:
        """The item that a client has given this name.

        Raises UnknownMediaError, and what `waiter` does.
        """
        if self._cache is None:
            raise UnknownMediaError("nothing is kept under names, because --mm-processor-cache-gb is 0")
        try:
            item = self._found(name, waiter)
        except AmbiguousNameError:
            raise UnknownMediaError("different contents were sent under this name") from None
        if item is None:
            self._on_lookup(False)
            others = f", one of {self._num_caches} that know their own alone" if self._num_caches > 1 else ""
            raise UnknownMediaError(f"it was not sent before to this API server{others}, or is not kept any more")
        return item

    async def prepare(
        self, name: bytes | None, waiter: Waiter, prepare: Prepare, in_thread: "InThread[PreparedItem]"
    ) -> PreparedItem:
        """What `prepare` yields, run by `in_thread`. Who asks for the same name meanwhile (None: it has none) gets the
        same. Only what is complete is remembered.

        Raises what `prepare` does, and what `waiter` does.
        """
        cache = self._cache
        if cache is None:
            with _alone(waiter) as (admit, check):
                return await in_thread(lambda: prepare(Asking(admit, _find_nothing, check)))
        was_known = False

        async def work(admit: Admit, check: Check) -> PreparedItem:
            nonlocal was_known

            def find(key: bytes) -> PreparedItem | None:
                nonlocal was_known
                item = self._find(cache, key)
                was_known = item is not None
                return item

            def prepare_and_keep() -> PreparedItem:
                item = prepare(Asking(admit, find, check))
                if not was_known:
                    for piece in item.pieces:
                        cache.keep(piece)
                return item

            item = await in_thread(prepare_and_keep)
            if not was_known:
                self._add(cache, item)
            if name is not None:
                self._names.remember(name, item.key)
            return item

        if name is None:
            with _alone(waiter) as (admit, check):
                item, has_joined = await work(admit, check), False
        else:
            item, has_joined = await self._flights.join(name, waiter, work)
        self._on_lookup(has_joined or was_known)
        return item

    async def prepare_again(self, key: bytes, prepare: Prepare, in_thread: "InThread[PreparedItem]") -> PreparedItem:
        """What `prepare` yields, with tensors: the engine core lacks those of the item with this key. Several requests
        may want them at a time."""

        async def work(admit: Admit, check: Check) -> PreparedItem:
            return await in_thread(lambda: prepare(Asking(admit, _find_nothing, check)))

        item, _ = await self._flights.join(b"again" + key, _Admitted(), work)
        return item

    def give_name(self, name: bytes, item: PreparedItem) -> None:
        """A client calls the item so."""
        if self._cache is not None:
            self._names.remember(name, item.key)

    def tensors_of(self, item: PreparedItem) -> PreparedItem | None:
        """The item with its tensors, if they are in this process. Called from any thread; may take long."""
        if item.tensors or self._cache is None:
            return item if item.tensors else None
        known = self._cache.with_tensors(item.key)
        return known if known is not None and known.tensors else None

    def outgoing(self, item: PreparedItem, shares: bool = False) -> PreparedItem:
        """`item`, of a request that is being sent, as it travels: without the tensors that its receiver has. `shares`:
        as in `ProcessorCache.outgoing`."""
        return item if self._cache is None else self._cache.outgoing(item, shares)

    def engine_lost(self) -> None:
        """An engine core is gone, and with it what it had."""
        if self._cache is not None:
            self._cache.clear()

    def _find(self, cache: ProcessorCache, key: bytes) -> PreparedItem | None:
        """The item with this key, with all of its parts if it has some. Called from any thread."""
        return self._wholes.find(key, cache.find) or cache.find(key)

    def _add(self, cache: ProcessorCache, item: PreparedItem) -> None:
        for piece in item.pieces:
            cache.add(piece)
        if item.parts:
            self._wholes.remember(item)

    def _found(self, name: bytes, waiter: Waiter) -> PreparedItem | None:
        key = self._names.find(name)
        item = None if key is None or self._cache is None else self._find(self._cache, key)
        if item is not None:
            waiter.take(item.num_tokens)
            waiter.check()
            self._on_lookup(True)
        return item


def _make_cache(placement: CachePlacement, store: ObjectStore | None) -> ProcessorCache | None:
    match placement.placement:
        case Placement.NOWHERE:
            return None
        case Placement.KEYS:
            return KeyCache(placement.items_bytes)
        case Placement.ITEMS:
            return ItemCache(placement.items_bytes)
        case Placement.SHARED if store is not None:
            return SharedCache(store)
    raise ConfigError(f"there is no cache of prepared media {placement.placement}")


@contextmanager
def _alone(waiter: Waiter) -> Iterator[tuple[Admit, Check]]:
    """For work that nobody else waits for, and this one until the context ends."""
    is_gone = False

    def check() -> None:
        if is_gone:
            raise NobodyHasRoomError

    def admit(num_tokens: int) -> None:
        check()
        waiter.take(num_tokens)
        waiter.check()

    try:
        yield admit, check
    finally:
        is_gone = True


class _Admitted:
    """A `Waiter` that had room before."""

    def take(self, num_tokens: int) -> bool:
        return True

    def check(self) -> None:
        """Nothing to say."""


def _find_nothing(key: bytes) -> None:
    """Where nothing is remembered, or what is has no tensors."""


def _ignore(was_known: bool) -> None:
    """Nobody counts."""
