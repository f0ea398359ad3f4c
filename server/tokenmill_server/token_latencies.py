"""Times between the outputs of a request, counted many at once: a histogram's file asks as much for one as for many."""

import asyncio
from collections import defaultdict

from tokenmill_engine.metrics import FrontendMetrics

_MAX_WAITING = 64
_MAX_AGE_S = 0.25
"""What waits is not in /metrics yet, and is lost with the process; slow streams would not fill a list in seconds."""


class TokenLatencies:
    """Those of all requests of this process. None waits for more than `_MAX_AGE_S`, or the end of a request."""

    def __init__(self, metrics: FrontendMetrics | None) -> None:
        self._metrics = metrics
        self._waiting: defaultdict[int, list[float]] = defaultdict(list)
        self._is_timed = False
        """All is going to be counted."""

    def of(self, engine: int) -> list[float]:
        """Where to put what an engine core's outputs took, in seconds."""
        return self._waiting[engine]

    def count_many(self, engine: int) -> None:
        """Counts what waits, if it is worth it; else a little later. Called in the event loop."""
        num_waiting = len(self._waiting[engine])
        if num_waiting >= _MAX_WAITING:
            self.count(engine)
        elif num_waiting and not self._is_timed:
            self._is_timed = True
            asyncio.get_running_loop().call_later(_MAX_AGE_S, self._count_all)

    def count(self, engine: int) -> None:
        """Counts what waits."""
        waiting = self._waiting[engine]
        if waiting and self._metrics is not None:
            self._metrics.inter_token_latency[engine].observe_many(waiting)
        waiting.clear()

    def _count_all(self) -> None:
        self._is_timed = False
        for engine in self._waiting:
            self.count(engine)
