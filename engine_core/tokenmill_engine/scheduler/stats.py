"""The line about throughput and load that an engine core logs every few seconds."""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tokenmill_engine.messages import EngineLoad
from tokenmill_engine.request import Request

logger = logging.getLogger(__name__)

_HIT_RATE_QUERIES = 1000
"""The prefix hit rate is that of about so many last requests."""


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start."""

    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    """Tokens of admitted requests, each counted once."""
    prefix_cache_hits: int = 0
    num_known_tokens: int = 0
    """Generated tokens that nobody sampled, since nothing else could follow."""

    def count_preemption(self, request: Request, num_computed: int, shortage: str) -> None:
        """The request has lost its blocks, with `num_computed` tokens in them."""
        self.num_preemptions += 1
        logger.warning(
            "Request %s (%d) preempted in mode RECOMPUTE: not enough KV cache space, the running requests need %s. Its "
            "%d computed tokens will be computed again, which affects end-to-end performance. If this happens often, "
            "raise kv_cache_memory_bytes (on a GPU gpu_memory_utilization) or tensor_parallel_size for more KV cache "
            "space, or lower max_num_seqs. total_cumulative_preemption_cnt=%d",
            request.label,
            request.request_id,
            shortage,
            num_computed,
            self.num_preemptions,
        )


class IntervalStats:
    """Counts since the last line."""

    def __init__(self, engine: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._since = clock()
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._num_preemptions_before = 0
        self._queries: deque[tuple[int, int]] = deque(maxlen=_HIT_RATE_QUERIES)

    def count_prefill(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """A request's prompt is complete."""
        self._num_prompt_tokens += num_prompt_tokens
        self._queries.append((num_prompt_tokens, num_cached_tokens))

    def count_generated(self, num_tokens: int) -> None:
        self._num_generation_tokens += num_tokens

    def line(self, load: EngineLoad, counters: SchedulerCounters) -> tuple[str, bool]:
        """The text, and whether anything happened; the next interval begins."""
        now = self._clock()
        seconds = max(now - self._since, 1e-9)
        prompt, generated = self._num_prompt_tokens / seconds, self._num_generation_tokens / seconds
        preempted = counters.num_preemptions - self._num_preemptions_before
        queried = sum(tokens for tokens, _ in self._queries)
        hit_rate = sum(cached for _, cached in self._queries) / queried if queried else 0.0
        text = (
            f"Engine {self._engine:03d}: prompt throughput {prompt:.1f} tokens/s, "
            f"generation throughput {generated:.1f} tokens/s, "
            f"running {load.num_running} reqs, waiting {load.num_waiting} reqs, "
            + (f"preemptions {preempted}, " if preempted else "")
            + f"KV cache usage {load.kv_usage:.1%}, prefix cache hit rate {hit_rate:.1%}"
        )
        is_idle = prompt == generated == 0.0 and load.num_running == load.num_waiting == 0
        self._since = now
        self._num_prompt_tokens = self._num_generation_tokens = 0
        self._num_preemptions_before = counters.num_preemptions
        return text, not is_idle
