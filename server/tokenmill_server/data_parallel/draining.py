"""Which API servers still have requests on engine cores that are to take no new ones. Knows nothing of processes."""

from collections.abc import Callable, Iterable

from tokenmill_engine.ipc.control import EngineDrained, EngineDraining

_Key = tuple[int, int]
"""Engine core and incarnation."""


class EngineDrains:
    """At the head. Each drain ends once."""

    def __init__(self, on_drained: Callable[[int], None]) -> None:
        """`on_drained` is called with an engine core when no API server has requests there any more."""
        self._on_drained = on_drained
        self._busy: dict[_Key, set[int]] = {}
        """The API servers that have not answered."""

    def begin(self, draining: EngineDraining, clients: Iterable[int]) -> None:
        """`clients` are the API servers that are told of it. Without any it is over at once."""
        key = draining.engine, draining.incarnation
        self._busy[key] = set(clients)
        self._end_if_idle(key)

    def answered(self, client: int, drained: EngineDrained) -> None:
        """API server `client` says that nothing of its own is open there."""
        self._leave(client, (drained.engine, drained.incarnation))

    def client_gone(self, client: int) -> None:
        """API server `client` is gone, and with it what it had open. The next one in its place knows of the drains."""
        for key in list(self._busy):
            self._leave(client, key)

    def _leave(self, client: int, key: _Key) -> None:
        if key in self._busy:
            self._busy[key].discard(client)
            self._end_if_idle(key)

    def _end_if_idle(self, key: _Key) -> None:
        if not self._busy[key]:
            del self._busy[key]
            self._on_drained(key[0])
