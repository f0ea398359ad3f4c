"""Chooses the engine core for a request: the least loaded one.

Load is what the engine last reported (waiting + running, of all API servers) plus what this API server sent since
then, and never less than what this API server knows to be open there. Ties go round.
"""

from dataclasses import dataclass

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_engine.messages import EngineLoad


@dataclass(slots=True)
class _Engine:
    num_in_flight: int = 0
    """Sequences of this API server that are open."""
    num_reported: int = 0
    num_sent_since_report: int = 0
    is_lost: bool = False
    is_stalled: bool = False

    @property
    def load(self) -> int:
        return max(self.num_in_flight, self.num_reported + self.num_sent_since_report)


class LoadBalancer:
    """Knows every engine core's load as seen from one API server."""

    def __init__(self, num_engines: int) -> None:
        self._engines = [_Engine() for _ in range(num_engines)]
        self._next = 0

    def choose(self, pinned: int | None = None) -> int:
        """The engine for the next request, or `pinned` itself.

        Raises InvalidRequestError if there is no engine `pinned`.
        """
        count = len(self._engines)
        if pinned is not None:
            if not 0 <= pinned < count:
                raise InvalidRequestError(
                    f"there is no data-parallel rank {pinned}; ranks are 0 to {count - 1}", "X-data-parallel-rank"
                )
            return pinned
        if count == 1:
            return 0
        order = [(self._next + offset) % count for offset in range(count)]
        alive = [engine for engine in order if not self._engines[engine].is_lost] or order
        rotation = [engine for engine in alive if not self._engines[engine].is_stalled] or alive
        best = min(rotation, key=lambda engine: self._engines[engine].load)
        self._next = (best + 1) % count
        return best

    def sent(self, engine: int, num_sequences: int) -> None:
        """Sequences were sent to `engine`."""
        self._engines[engine].num_in_flight += num_sequences
        self._engines[engine].num_sent_since_report += num_sequences

    def ended(self, engine: int) -> None:
        """One sequence on `engine` is over."""
        self._engines[engine].num_in_flight -= 1

    def reported(self, engine: int, load: EngineLoad) -> None:
        """`engine` said how much it has to do."""
        state = self._engines[engine]
        state.num_reported = load.num_running + load.num_waiting
        state.num_sent_since_report = 0

    def lost(self, engine: int) -> None:
        """`engine` is gone: it is not chosen, and what it had reported is forgotten."""
        state = self._engines[engine]
        state.is_lost, state.is_stalled = True, False
        state.num_reported = state.num_sent_since_report = 0

    def joined(self, engine: int) -> None:
        """`engine` takes requests, for the first time or again."""
        self._engines[engine].is_lost = False

    def set_stalled(self, engine: int, stalled: bool) -> None:
        """A stalled engine is chosen only if all that are not lost are stalled."""
        self._engines[engine].is_stalled = stalled

    def in_flight(self, engine: int) -> int:
        """Open sequences of this API server on `engine`."""
        return self._engines[engine].num_in_flight
