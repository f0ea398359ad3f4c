"""Keeps one API server connected to every engine core that lives, as far as the launcher has told.

Whether one lives is the launcher's word alone: until it says otherwise, this goes on trying. `Readiness` has who is
missing.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from tokenmill_engine.errors import EngineDeadError
from tokenmill_engine.ipc.control import EngineDraining, EngineLost, EngineRecovered, EnginesReady, EngineStalled
from tokenmill_engine.messages import EngineReady
from tokenmill_server.readiness import Readiness
from tokenmill_server.text_generator import TextGenerator

logger = logging.getLogger(__name__)

_NOTICE_S = 1.0
"""After so long without a connection an engine core is called unreachable."""
_EXPLANATION_S = 2.0
"""How long the launcher has to tell why a connection to an engine core broke."""

Begin = Callable[[Coroutine[Any, Any, bool]], "asyncio.Task[bool]"]
"""Runs something beside everything else. The result of what is run here is False."""


class EngineConnections:
    """Does what the launcher's messages about engine cores ask for. Of one event loop."""

    def __init__(
        self,
        generator: TextGenerator,
        readiness: Readiness,
        begin: Begin,
        first_rank: int = 0,
        on_drained: Callable[[EngineDraining], None] = lambda _draining: None,
    ) -> None:
        """`first_rank`: the rank of engine core 0. `on_drained` is called when nothing is open any more on an engine
        core that drains."""
        self._generator = generator
        self._readiness = readiness
        self._begin = begin
        self._first_rank = first_rank
        self._on_drained = on_drained
        self._draining: dict[int, EngineDraining] = {}
        """The last drain of each engine core. Perhaps it is gone since."""
        self._connecting: set[asyncio.Task[bool]] = set()
        self._has_joined = False
        """Whether any engine core was ever connected."""
        self._stalled: dict[int, EngineStalled] = {}
        """As the launcher said, of connected engine cores and others."""
        generator.on_connection_broken(self._connection_broke)

    def introduce(self, ready: EnginesReady) -> None:
        """Connects to all that are there, at once."""
        for lost in ready.lost:
            self.lost(lost)
        for stalled in ready.stalled:
            self.stalls(stalled)
        for draining in ready.draining:
            self.drains(draining)
        for engine in ready.engines:
            self.connect(engine)

    def connect(self, engine: EngineReady) -> None:
        """From now on the engine core gets requests whenever it can be reached, until it is lost."""
        self._track(self._connect(engine))

    def lost(self, lost: EngineLost) -> None:
        """Whoever waits for it is told so now."""
        self._readiness.engine_lost(lost)
        self._generator.engine_lost(lost)

    def drains(self, draining: EngineDraining) -> None:
        """It gets nothing new, nor is it connected any more if it is not; what is open there goes on."""
        self._draining[draining.engine] = draining
        self._readiness.engine_drains(draining)
        self._generator.engine_drains(draining, lambda: self._on_drained(draining))

    def stalls(self, change: EngineStalled | EngineRecovered) -> None:
        """What is open there goes on waiting: the launcher ends an engine core that is stalled for too long."""
        if isinstance(change, EngineStalled):
            self._stalled[change.engine] = change
        else:
            self._stalled.pop(change.engine, None)
        self._pass_on(change)

    async def wait_for_one(self, timeout_s: float | None = None) -> None:
        """Waits until an engine core is connected, for the first time; not if none is left that could be."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._connecting and not self._has_joined:
                    await asyncio.wait(self._connecting, return_when=asyncio.FIRST_COMPLETED)

    async def wait_for_all(self, timeout_s: float) -> None:
        """Waits until every engine core is connected or lost."""
        if self._connecting:
            await asyncio.wait(self._connecting, timeout=timeout_s)

    def _track(self, work: Coroutine[Any, Any, bool]) -> None:
        task = self._begin(work)
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, engine: EngineReady) -> bool:
        loop = asyncio.get_running_loop()
        notice = loop.call_later(_NOTICE_S, self._call_unreachable, engine)
        try:
            while self._generator.misses(engine) and not self._drains(engine):
                try:
                    await self._generator.connect(engine)
                except EngineDeadError as error:
                    logger.debug("%s", error)  # if it has ended, the launcher tells everybody
                else:
                    self._joined(engine)
                    if loop.time() >= notice.when():
                        logger.info("engine core %d is connected", self._rank_of(engine))
        finally:
            notice.cancel()
        return False

    def _joined(self, engine: EngineReady) -> None:
        self._has_joined = True
        self._readiness.engine_joined(engine.engine, engine.incarnation)
        stalled = self._stalled.get(engine.engine)
        if stalled is not None:
            self._pass_on(stalled)

    def _call_unreachable(self, engine: EngineReady) -> None:
        if self._generator.misses(engine) and not self._drains(engine):
            reason = f"engine core {self._rank_of(engine)} cannot be reached"
            logger.error("%s at %s; it is tried again and again", reason, engine.endpoints.input)
            self._readiness.engine_unreachable(engine.engine, reason)

    def _connection_broke(self, engine: EngineReady) -> None:
        reason = f"the connection to engine core {self._rank_of(engine)} broke"
        if not self._drains(engine):
            self._readiness.engine_unreachable(engine.engine, reason)
        self._track(self._reconnect(engine, reason))

    async def _reconnect(self, engine: EngineReady, reason: str) -> bool:
        """If the engine core has ended, the launcher is about to tell why. If it lives, what is open there fails all
        the same: answers may be lost. Then it is connected anew, unless it drains."""
        await asyncio.sleep(_EXPLANATION_S)
        if not self._generator.misses(engine):
            return False
        logger.error("%s%s", reason, "" if self._drains(engine) else "; connecting again")
        self._generator.fail_engine(engine.engine, EngineDeadError(reason))
        return await self._connect(engine)

    def _pass_on(self, change: EngineStalled | EngineRecovered) -> None:
        """Has an effect if this incarnation is connected."""
        self._readiness.engine_stalls(change)
        self._generator.engine_stalls(change)

    def _drains(self, engine: EngineReady) -> bool:
        draining = self._draining.get(engine.engine)
        return draining is not None and draining.incarnation >= engine.incarnation

    def _rank_of(self, engine: EngineReady) -> int:
        return self._first_rank + engine.engine
