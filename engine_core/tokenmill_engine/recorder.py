"""Metrics and the stats line of one engine core. Does nothing where they are switched off."""

import logging
import math
import time

from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.messages import EngineLoad, FinishReason
from tokenmill_engine.metrics import EngineMetrics
from tokenmill_engine.outputs import KVCapacity, StepPlan
from tokenmill_engine.request import Request
from tokenmill_engine.scheduler.outcome import StepOutcome
from tokenmill_engine.scheduler.scheduler import Scheduler
from tokenmill_engine.scheduler.stats import IntervalStats

logger = logging.getLogger(__name__)


class Recorder:
    """Used by one thread."""

    def __init__(self, config: EngineConfig, capacity: KVCapacity, rank: int) -> None:
        observability = config.observability
        self._stats = IntervalStats(rank)
        self._metrics = EngineMetrics(
            observability.model_name,
            rank,
            config.model.max_model_len,
            observability.metrics_namespaces if observability.log_stats else (),
        )
        self._metrics.set_cache_config(
            {
                "block_size": capacity.block_size,
                "num_gpu_blocks": capacity.num_blocks,
                "num_gpu_blocks_override": config.cache.num_gpu_blocks_override,
                "gpu_memory_utilization": config.cache.gpu_memory_utilization,
                "kv_cache_memory_bytes": config.cache.kv_cache_memory_bytes,
                "enable_prefix_caching": config.cache.enable_prefix_caching,
                "kv_cache_size_tokens": capacity.num_blocks // len(capacity.groups) * capacity.block_size,
                "kv_cache_max_concurrency": round(
                    capacity.num_blocks // len(capacity.groups) * capacity.block_size / capacity.max_model_len, 2
                ),
            }
        )
        self._metrics.set_startup(capacity.phases)
        self._num_preemptions = 0
        self._num_known_tokens = 0
        self._prefix_queries = 0
        self._prefix_hits = 0

    def set_load(self, load: EngineLoad) -> None:
        self._metrics.set_load(load)

    def record_step(self, plan: StepPlan, outcome: StepOutcome, scheduler: Scheduler) -> None:
        """Count a step that was committed."""
        metrics, counters = self._metrics, scheduler.counters
        metrics.iteration_tokens.observe(plan.num_tokens)
        num_generated = len(outcome.token_ids)
        if num_generated:
            metrics.generation_tokens.inc(num_generated)
            self._stats.count_generated(num_generated)
        if counters.num_preemptions != self._num_preemptions:
            metrics.num_preemptions.inc(counters.num_preemptions - self._num_preemptions)
            self._num_preemptions = counters.num_preemptions
        if counters.num_known_tokens != self._num_known_tokens:
            metrics.known_tokens.inc(counters.num_known_tokens - self._num_known_tokens)
            self._num_known_tokens = counters.num_known_tokens
        if counters.prefix_cache_queries != self._prefix_queries:
            metrics.prefix_cache_queries.inc(counters.prefix_cache_queries - self._prefix_queries)
            metrics.prefix_cache_hits.inc(counters.prefix_cache_hits - self._prefix_hits)
            self._prefix_queries, self._prefix_hits = counters.prefix_cache_queries, counters.prefix_cache_hits
        for request in outcome.prefilled.values():
            metrics.count_prefill(request.num_prompt_tokens, request.num_cached_tokens)
            self._stats.count_prefill(request.num_prompt_tokens, request.num_cached_tokens)
        if outcome.finished:
            now = time.monotonic()
            for request, _ in outcome.finished.values():
                self.record_finish(request, now)

    def record_device(self, elapsed_s: float, encoder_s: float, mixed_tokens: int) -> None:
        """How long a step took, how long of that it encoded, and what one with prompts beside running streams may
        compute."""
        if 0.0 < elapsed_s < math.inf:
            self._metrics.step_time.observe(elapsed_s)
        if 0.0 < encoder_s < math.inf:
            self._metrics.encoder_time.observe(encoder_s)
        self._metrics.mixed_step_tokens.set(mixed_tokens)

    def record_serve(self, elapsed_s: float) -> None:
        """An API server is connected, so long after the engine was ready; the last one counts."""
        self._metrics.set_serve(max(0.0, elapsed_s))

    def record_refusal(self) -> None:
        self._metrics.count_finish(FinishReason.ERROR)

    def record_finish(self, request: Request, now: float) -> None:
        """Count a request that ended at `now`; phases it never reached are left out."""
        assert request.finish_reason is not None
        metrics = self._metrics
        metrics.count_finish(request.finish_reason)
        metrics.request_prompt_tokens.observe(request.num_prompt_tokens)
        metrics.request_generation_tokens.observe(len(request.saved_output))
        metrics.request_params_max_tokens.observe(request.max_tokens)
        metrics.request_num_preemptions.observe(request.num_preemptions)
        if request.first_scheduled_time:
            metrics.request_queue_time.observe(request.first_scheduled_time - request.queued_time)
            metrics.request_inference_time.observe(now - request.first_scheduled_time)
        if request.first_token_time:
            metrics.request_prefill_kv_computed_tokens.observe(request.num_prompt_tokens - request.num_cached_tokens)
            metrics.request_prefill_time.observe(request.first_token_time - request.first_scheduled_time)
            metrics.request_decode_time.observe(now - request.first_token_time)

    def log_stats(self, scheduler: Scheduler) -> None:
        text, happened = self._stats.line(scheduler.load, scheduler.counters)
        logger.log(logging.INFO if happened else logging.DEBUG, "%s", text)
