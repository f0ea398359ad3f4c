"""How much may be open before requests are refused (`--max-num-queued-reqs`, `--max-num-queued-tokens`).

Each API server writes what it has open into its own cells of a memory-mapped file that all of them read, so that the
limits hold for the server as a whole. Two of them that admit at the same moment may exceed a limit by one request.
"""

import mmap
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
_RETRY_AFTER_S = 1


class QueueCounts:
    """Sequences that are open and prompt tokens whose first answer is awaited, of every API server, as pairs of int64.
    Writing is for one's own pair only; a new incarnation begins with nothing."""

    def __init__(self, path: Path, num_servers: int, own: int) -> None:
        size = 2 * _CELL_BYTES * num_servers
        reserve(path, size)
        with path.open("r+b") as file:
            self._cells = memoryview(mmap.mmap(file.fileno(), size)).cast("q")
        self._own = own
        self.write(0, 0)

    def write(self, num_sequences: int, num_tokens: int) -> None:
        """What this API server has open."""
        self._cells[2 * self._own] = num_sequences
        self._cells[2 * self._own + 1] = num_tokens

    def totals(self) -> tuple[int, int]:
        """Sequences and prompt tokens of all API servers."""
        return sum(self._cells[::2]), sum(self._cells[1::2])


class Admission:
    """Refuses requests beyond the limits, before any work is done for them."""

    def __init__(self, config: ServerConfig, counts: QueueCounts, on_refused: Callable[[str], None]) -> None:
        """`on_refused` is called with `REQUESTS` or `TOKENS`."""
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
        open_sequences, open_tokens = self._counts.totals()
        if self._max_sequences is not None and open_sequences + num_sequences > self._max_sequences:
            self._on_refused(REQUESTS)
            raise OverloadedError(
                f"{open_sequences} sequences are waiting or running and {num_sequences} more would exceed "
                f"--max-num-queued-reqs {self._max_sequences}",
                None if num_sequences > self._max_sequences else _RETRY_AFTER_S,
            )
        # A prompt longer than the limit is taken when nothing else is queued: it would never be otherwise.
        if self._max_tokens is not None and open_tokens and open_tokens + num_tokens > self._max_tokens:
            self._on_refused(TOKENS)
            raise OverloadedError(
                f"{open_tokens} prompt tokens are queued and {num_tokens} more would exceed "
                f"--max-num-queued-tokens {self._max_tokens}",
                _RETRY_AFTER_S,
            )


def make_admission(
    config: ServerConfig, folder: Path, own: int, on_refused: Callable[[str], None]
) -> tuple[Admission | None, Callable[[int, int], None] | None]:
    """The check and where to write what is open; None without a limit. `folder` is that of the server's processes."""
    if config.max_num_queued_reqs is None and config.max_num_queued_tokens is None:
        return None, None
    counts = QueueCounts(folder / QUEUE_COUNTS_FILE, config.api_server_count, own)
    return Admission(config, counts, on_refused), counts.write
