"""What API servers are told of an engine core beside the outputs of their requests: its load and its blocks."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from tokenmill_engine.block_hash import pack_short_names
from tokenmill_engine.ipc.ids import client_of, is_incarnation
from tokenmill_engine.kv_cache.block_pool import BlockPool
from tokenmill_engine.kv_cache.events import BlockJournal
from tokenmill_engine.messages import BlockEvents, EngineLoad, EngineMessage, LoadReport, StepOutput

Output = tuple[int, EngineMessage]
"""A message and the API server it goes to."""

_BLOCK_EVENTS_INTERVAL_S = 0.02
_KV_USAGE_CHANGE = 0.01
"""A smaller change of KV usage alone is not worth a message."""
_WAITING_TOKENS_CHANGE = 1024


class Reporter:
    """Knows which API servers listen, and what each was told last."""

    def __init__(
        self,
        engine: int,
        pool: BlockPool,
        journal: BlockJournal | None = None,
        counts_requests: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`journal` follows the names of `pool`; None: block events are not published."""
        self._engine = engine
        self._pool = pool
        self._journal = journal
        self._clock = clock
        self.num_received: dict[int, int] | None = {} if counts_requests else None
        """By API server that listens: requests of its present incarnation. None: they are not counted."""
        self._listeners: dict[int, _Listener] = {}
        """By API server."""
        self._events_due = 0.0
        """When block events may be sent again."""

    def add_listener(self, client: int, incarnation: int) -> bool:
        """An API server wants to be told, from now on and from the beginning; its predecessor no more. Returns whether
        this incarnation of it has not listened before."""
        known = self._listeners.get(client)
        self._listeners[client] = _Listener(incarnation)
        if self.num_received is not None:
            self.num_received[client] = 0
        return known is None or known.incarnation != incarnation

    def begin_anew(self, client: int, incarnation: int) -> None:
        """Tell an API server that listens from the beginning again; nothing for others."""
        listener = self._listeners.get(client)
        if listener is not None and listener.incarnation == incarnation:
            self._listeners[client] = _Listener(incarnation)

    def remove_listener(self, client: int, incarnation: int) -> None:
        """That incarnation of an API server is gone; if there is a successor, it stays."""
        listener = self._listeners.get(client)
        if listener is not None and listener.incarnation == incarnation:
            del self._listeners[client]
            if self.num_received is not None:
                del self.num_received[client]

    def count_request(self, request_id: int) -> None:
        """An API server has sent a request, good or bad."""
        client = client_of(request_id)
        listener = self._listeners.get(client)
        is_present = listener is not None and is_incarnation(request_id, listener.incarnation)
        if self.num_received is not None and is_present:
            self.num_received[client] += 1

    def load_for(self, client: int, load: EngineLoad) -> EngineLoad:
        """The load as this API server is told it."""
        if self.num_received is None:
            return load
        return msgspec.structs.replace(load, num_received=self.num_received.get(client))

    def report(self, outputs: list[Output], load: EngineLoad) -> None:
        """Append what is to be told after `outputs`, which a step has yielded."""
        if not self._listeners:
            return
        for client, message in outputs:
            listener = self._listeners.get(client)
            if listener is not None and isinstance(message, StepOutput):
                listener.load = message.load
        for client, listener in self._listeners.items():
            told = self.load_for(client, load)
            if listener.load is None or _differs(listener.load, told):
                outputs.append((client, LoadReport(self._engine, told, listener.incarnation)))
                listener.load = told
        if self._journal is not None:
            self._report_blocks(outputs, self._journal, is_idle=load.num_running + load.num_waiting == 0)

    def _report_blocks(self, outputs: list[Output], journal: BlockJournal, is_idle: bool) -> None:
        """Changes go to those who have the snapshot before they begin anew with one for a newcomer."""
        now = self._clock()
        newcomers = [item for item in self._listeners.items() if not item[1].has_snapshot]
        if not journal.is_empty and (newcomers or is_idle or now >= self._events_due):
            stored, removed = journal.take()
            changes = BlockEvents(self._engine, pack_short_names(stored), pack_short_names(removed))
            for client, listener in self._listeners.items():
                if listener.has_snapshot:
                    message = msgspec.structs.replace(changes, incarnation=listener.incarnation)
                    outputs.append((client, message))
            self._events_due = now + _BLOCK_EVENTS_INTERVAL_S
        if newcomers:
            names = pack_short_names(self._pool.names(0))
            for client, listener in newcomers:
                snapshot = BlockEvents(self._engine, names, b"", listener.incarnation, is_snapshot=True)
                outputs.append((client, snapshot))
                listener.has_snapshot = True


@dataclass(slots=True)
class _Listener:
    """An API server that wants to know, and what it was told last."""

    incarnation: int
    load: EngineLoad | None = None
    has_snapshot: bool = False


def _differs(known: EngineLoad, load: EngineLoad) -> bool:
    return (
        known.num_running != load.num_running
        or known.num_waiting != load.num_waiting
        or known.num_received != load.num_received
        or abs(known.kv_usage - load.kv_usage) >= _KV_USAGE_CHANGE
        or abs(known.num_waiting_tokens - load.num_waiting_tokens) >= _WAITING_TOKENS_CHANGE
    )
