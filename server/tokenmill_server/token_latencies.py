"""Times between the outputs of a request, counted many at once: a histogram's file asks as much for one as for many."""

from collections import defaultdict

from tokenmill_engine.metrics import FrontendMetrics

_MAX_WAITING = 64


class TokenLatencies:
    """Those of all requests of this process. None waits longer than until a request ends."""

    def __init__(self, metrics: FrontendMetrics | None) -> None:
        self._metrics = metrics
        self._waiting: defaultdict[int, list[float]] = defaultdict(list)

    def of(self, engine: int) -> list[float]:
        """Where to put what an engine core's outputs took, in seconds."""
        return self._waiting[engine]

    def count_many(self, engine: int) -> None:
        """Counts what waits, if it is worth it."""
        if len(self._waiting[engine]) >= _MAX_WAITING:
            self.count(engine)

    def count(self, engine: int) -> None:
        """Counts what waits."""
        waiting = self._waiting[engine]
        if waiting and self._metrics is not None:
            self._metrics.inter_token_latency[engine].observe_many(waiting)
        waiting.clear()
