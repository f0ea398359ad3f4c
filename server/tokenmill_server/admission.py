"""How much may be open before requests are refused (`--max-num-queued-reqs`, `--max-num-queued-tokens`).

Each API server writes what it has open into its own cells of a memory-mapped file that all of them read, so that the
limits hold for the server as a whole. Two of them that admit at the same moment may exceed a limit by one request.
"""

import math
import mmap
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenmill_engine.errors import OverloadedError
from tokenmill_engine.ipc.files import reserve
from tokenmill_server.config import ServerConfig
from tokenmill_server.processing.generation import GenerationRequest

QUEUE_COUNTS_FILE = "queue.counts"
REQUESTS, TOKENS = "max_num_queued_reqs", "max_num_queued_tokens"
"""The flags, as metrics name them."""

_CELL_BYTES = 8
_NUM_CELLS = 4
"""Of one server: open sequences, queued prompt tokens, and how many of each have left so far."""
_RATE_WINDOW_S = 30.0
_SAMPLE_PERIOD_S = 1.0
_MAX_RETRY_AFTER_S = 60
"""Clients give up where they are told to wait for minutes."""


class QueueCounts:
    """Sequences that are open and prompt tokens whose first answer is awaited, of every API server, and how many of
    both have left, as int64. Writing is for one's own cells only; a new incarnation begins with nothing."""

    def __init__(self, path: Path, num_servers: int, own: int) -> None:
        size = _NUM_CELLS * _CELL_BYTES * num_servers
        reserve(path, size)
        with path.open("r+b") as file:
            self._cells = memoryview(mmap.mmap(file.fileno(), size)).cast("q")
        self._first = _NUM_CELLS * own
        self._cells[self._first : self._first + _NUM_CELLS] = memoryview(bytes(_NUM_CELLS * _CELL_BYTES)).cast("q")

    def write(self, num_sequences: int, num_tokens: int) -> None:
        """What this API server has open; told after every change, so what is missing has left."""
        cells = self._cells
        for cell, number in ((self._first, num_sequences), (self._first + 1, num_tokens)):
            if number < cells[cell]:
                cells[cell + 2] += cells[cell] - number
            cells[cell] = number

    def open(self) -> tuple[int, int]:
        """Sequences and prompt tokens of all API servers."""
        return sum(self._cells[::_NUM_CELLS]), sum(self._cells[1::_NUM_CELLS])

    def left(self) -> tuple[int, int]:
        """How many sequences and prompt tokens were open once and are not any more."""
        return sum(self._cells[2::_NUM_CELLS]), sum(self._cells[3::_NUM_CELLS])


class Admission:
    """Refuses requests beyond the limits, before any work is done for them."""

    def __init__(
        self,
        config: ServerConfig,
        counts: QueueCounts,
        on_refused: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_refused` is called with `REQUESTS` or `TOKENS`."""
        self._clock = clock
        self._samples: deque[tuple[float, tuple[int, int]]] = deque()
        """When, and what had left the queue by then; of the last half minute, if there were requests."""
        self._max_sequences = config.max_num_queued_reqs
        self._max_tokens = config.max_num_queued_tokens
        self._counts = counts
        self._on_refused = on_refused

    def check_room(self) -> None:
        """Raises OverloadedError if not even the smallest request is taken now."""
        self._check(1, 0)

    def check(self, requests: Sequence[GenerationRequest]) -> None:
        """Raises OverloadedError if these prompts, one HTTP request, are too many now."""
        self._check(
            sum(request.sampling.n for request in requests), sum(len(request.prompt_token_ids) for request in requests)
        )

    def _check(self, num_sequences: int, num_tokens: int) -> None:
        open_sequences, open_tokens = self._counts.open()
        self._sample()
        if self._max_sequences is not None and open_sequences + num_sequences > self._max_sequences:
            self._on_refused(REQUESTS)
            raise OverloadedError(
                f"{open_sequences} sequences are waiting or running and {num_sequences} more would exceed "
                f"--max-num-queued-reqs {self._max_sequences}",
                None
                if num_sequences > self._max_sequences
                else self._retry_after_s(open_sequences + num_sequences - self._max_sequences, 0),
            )
        # A prompt longer than the limit is taken when nothing else is queued: it would never be otherwise.
        if self._max_tokens is not None and open_tokens and open_tokens + num_tokens > self._max_tokens:
            self._on_refused(TOKENS)
            raise OverloadedError(
                f"{open_tokens} prompt tokens are queued and {num_tokens} more would exceed "
                f"--max-num-queued-tokens {self._max_tokens}",
                self._retry_after_s(open_tokens + num_tokens - self._max_tokens, 1),
            )

    def _sample(self) -> None:
        now = self._clock()
        if not self._samples or now - self._samples[-1][0] >= _SAMPLE_PERIOD_S:
            self._samples.append((now, self._counts.left()))
        while now - self._samples[0][0] > _RATE_WINDOW_S:
            self._samples.popleft()

    def _retry_after_s(self, excess: int, quantity: int) -> int:
        """When so many sequences (`quantity` 0) or prompt tokens (1) will have left, as fast as they did lately."""
        since, left = self._samples[0]
        elapsed_s, num_left = self._clock() - since, self._counts.left()[quantity] - left[quantity]
        if elapsed_s < _SAMPLE_PERIOD_S or num_left <= 0:
            return 1
        return max(1, min(_MAX_RETRY_AFTER_S, math.ceil(excess * elapsed_s / num_left)))


def make_counts(config: ServerConfig, folder: Path, own: int) -> QueueCounts | None:
    """Where API server `own` writes what is open; None if nobody asks. `folder` is that of the server's processes."""
    if not config.load_tracking and not _has_limit(config):
        return None
    return QueueCounts(folder / QUEUE_COUNTS_FILE, config.api_server_count, own)


def make_admission(
    config: ServerConfig, counts: QueueCounts | None, on_refused: Callable[[str], None]
) -> Admission | None:
    """None without a limit."""
    return None if counts is None or not _has_limit(config) else Admission(config, counts, on_refused)


def _has_limit(config: ServerConfig) -> bool:
    return config.max_num_queued_reqs is not None or config.max_num_queued_tokens is not None
