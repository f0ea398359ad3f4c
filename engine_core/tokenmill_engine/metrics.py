"""Every Prometheus series of the product, by name. Torch-free.

Engine cores write what only they know (`EngineMetrics`), API servers what only they see (`FrontendMetrics`), the
launcher who is there (`LauncherMetrics`). With `PROMETHEUS_MULTIPROC_DIR` set before the first import, values live in
one memory-mapped file per process; they outlive it, and any API server can answer for all (`metric_files`). Counters
and histograms add up over processes; a gauge has exactly one writer, and ends with it.

Names carry a prefix per configured namespace. No namespace means no series: every method is then a cheap no-op.
"""

import os
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, values

from tokenmill_engine.ipc.files import reserve
from tokenmill_engine.messages import EngineLoad, FinishReason
from tokenmill_engine.metric_series import BatchHistogram, CounterSeries, GaugeSeries, SeriesBuilder

REQUEST_LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TIME_TO_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_LATENCY_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
STEP_TIME_BUCKETS = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5),
    *(1.0, 2.5, 5.0, 10.0),
)
ITERATION_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PARAMS_N_BUCKETS = (1, 2, 5, 10, 20)
NUM_PREEMPTIONS_BUCKETS = (1, 2, 3, 4, 5, 10, 20)
HTTP_DURATION_BUCKETS = (0.1, 0.5, 1.0)

_FEW_SERIES_BYTES = 256 << 10
_HISTOGRAM_BYTES = 1 << 20
"""Space for the values of one process; an engine's histograms take about 50 KiB in each namespace."""
_FINISHED_REASONS = tuple(str(reason) for reason in FinishReason)
_REQUEST_SUCCESS = ("request_success_total", "Requests that ended, by reason.")
_TOKEN_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
_WAITING_REASONS = ("capacity", "deferred")
_REJECTION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")


def token_count_buckets(max_model_len: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `max_model_len`."""
    buckets: list[int] = []
    decade = 1
    while decade <= max_model_len:
        buckets.extend(step * decade for step in (1, 2, 5) if step * decade <= max_model_len)
        decade *= 10
    return tuple(buckets)


def _prefixes(namespaces: Iterable[str]) -> list[str]:
    return [f"{namespace}:" for namespace in namespaces]


def _reserve_files(num_engines: int, num_namespaces: int, *, histograms: bool = True) -> None:
    """Takes the space of this process's files before prometheus-client maps them; it would take it only when written.

    Raises:
        StartupError: there is none.
    """
    if not getattr(values.ValueClass, "_multiprocess", False):
        return
    sizes = {
        "counter": _FEW_SERIES_BYTES,
        "gauge_mostrecent": _FEW_SERIES_BYTES,
        "histogram": max(_HISTOGRAM_BYTES, num_engines * num_namespaces * _HISTOGRAM_BYTES // 8),
    }
    if not histograms:
        del sizes["histogram"]
    for kind, size in sizes.items():
        reserve(os.path.join(os.environ["PROMETHEUS_MULTIPROC_DIR"], f"{kind}_{os.getpid()}.db"), size)


class EngineMetrics:
    """What one engine core exports. Written by its main thread alone."""

    def __init__(
        self,
        model_name: str,
        engine: int,
        max_model_len: int,
        namespaces: Sequence[str] = ("tokenmill",),
        registry: CollectorRegistry | None = None,
    ) -> None:
        _reserve_files(1, len(namespaces))
        self._registry = registry or CollectorRegistry()
        self._prefixes = _prefixes(namespaces)
        self._engine = str(engine)
        self._build = build = SeriesBuilder(
            self._prefixes, {"model_name": model_name, "engine": self._engine}, self._registry
        )
        self._add_state(build)
        self._add_token_counters(build)
        self._add_request_histograms(build, token_count_buckets(max_model_len))

    def _add_state(self, build: SeriesBuilder) -> None:
        self.num_requests_running = build.gauge("num_requests_running", "Requests that hold a slot of the batch.")
        self.num_requests_waiting = build.gauge("num_requests_waiting", "Requests that wait to be scheduled.")
        self._waiting_for_capacity, self._deferred = build.gauges(
            "num_requests_waiting_by_reason",
            "Waiting requests by what they wait for: `capacity`; `deferred` is always 0.",
            [{"reason": reason} for reason in _WAITING_REASONS],
        )
        self.kv_cache_usage_perc = build.gauge("kv_cache_usage_perc", "Share of KV cache blocks in use, 0 to 1.")
        self.mixed_step_tokens = build.gauge(
            "mixed_step_token_budget", "Tokens that a step with prompts beside running streams may compute."
        )
        self.step_time = build.histogram(
            "step_time_seconds",
            "Time of an engine step: on a GPU from when its enqueueing began, or the step before ended, to its end.",
            STEP_TIME_BUCKETS,
        )
        self.encoder_time = build.histogram(
            "encoder_time_seconds",
            "Part of a step's time in which it encoded images or videos, of steps that did.",
            STEP_TIME_BUCKETS,
        )
        self.num_preemptions = build.counter(
            "num_preemptions_total", "Requests preempted because KV cache blocks ran out."
        )

    def _add_token_counters(self, build: SeriesBuilder) -> None:
        self.prefix_cache_queries = build.counter("prefix_cache_queries_total", "Tokens looked up in the prefix cache.")
        self.prefix_cache_hits = build.counter("prefix_cache_hits_total", "Tokens found in the prefix cache.")
        self._prompt_tokens = build.counter("prompt_tokens_total", "Prompt tokens prefilled, cached ones included.")
        self._prompt_tokens_cached = build.counter("prompt_tokens_cached_total", "Prompt tokens taken from a cache.")
        self._prompt_tokens_computed, self._prompt_tokens_hit, _ = build.counters(
            "prompt_tokens_by_source_total",
            "Prompt tokens by where their keys and values came from.",
            [{"source": source} for source in _TOKEN_SOURCES],
        )
        self.generation_tokens = build.counter("generation_tokens_total", "Tokens generated.")
        self.known_tokens = build.counter(
            "known_tokens_total", "Tokens generated that nobody sampled: a grammar left no choice (jump-forward)."
        )
        self.iteration_tokens = build.histogram(
            "iteration_tokens_total", "Tokens computed in one engine step.", ITERATION_TOKENS_BUCKETS
        )

    def _add_request_histograms(self, build: SeriesBuilder, token_buckets: Sequence[int]) -> None:
        counters = build.counters(*_REQUEST_SUCCESS, [{"finished_reason": reason} for reason in _FINISHED_REASONS])
        self._finished = dict(zip(_FINISHED_REASONS, counters, strict=True))
        self._serve: GaugeSeries | None = None
        self.request_prompt_tokens = build.histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", token_buckets
        )
        self.request_generation_tokens = build.histogram(
            "request_generation_tokens", "Tokens generated for a request.", token_buckets
        )
        self.request_params_max_tokens = build.histogram(
            "request_params_max_tokens", "max_tokens of a request.", token_buckets
        )
        self.request_prefill_kv_computed_tokens = build.histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a request that no cache held.", token_buckets
        )
        self.request_num_preemptions = build.histogram(
            "request_num_preemptions", "How often a request was preempted.", NUM_PREEMPTIONS_BUCKETS
        )
        self.request_queue_time = build.histogram(
            "request_queue_time_seconds", "From arrival in the engine to the first step.", REQUEST_LATENCY_BUCKETS
        )
        self.request_prefill_time = build.histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", REQUEST_LATENCY_BUCKETS
        )
        self.request_decode_time = build.histogram(
            "request_decode_time_seconds", "From the first token to the last.", REQUEST_LATENCY_BUCKETS
        )
        self.request_inference_time = build.histogram(
            "request_inference_time_seconds", "From the first step to the last token.", REQUEST_LATENCY_BUCKETS
        )

    def set_load(self, load: EngineLoad) -> None:
        """The gauges, after a step, an arrival or an abort."""
        self.num_requests_running.set(load.num_running)
        self.num_requests_waiting.set(load.num_waiting)
        self._waiting_for_capacity.set(load.num_waiting)
        self.kv_cache_usage_perc.set(load.kv_usage)

    def count_prefill(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """A request's prompt is complete for the first time."""
        self._prompt_tokens.inc(num_prompt_tokens)
        self._prompt_tokens_cached.inc(num_cached_tokens)
        self._prompt_tokens_computed.inc(num_prompt_tokens - num_cached_tokens)
        self._prompt_tokens_hit.inc(num_cached_tokens)

    def count_finish(self, reason: FinishReason) -> None:
        self._finished[str(reason)].inc()

    def set_startup(self, phases: Mapping[str, float]) -> None:
        """Publish how long each phase of the start took, in seconds, by its name. `set_serve` follows."""
        if not phases:
            return
        series = self._build.gauges(
            "startup_seconds",
            "Phases of the start, one after the other from the command on; the last ends when API servers can reach "
            "the engine.",
            [{"phase": phase} for phase in (*phases, "serve")],
        )
        *earlier, self._serve = series
        for gauge, seconds in zip(earlier, phases.values(), strict=True):
            gauge.set(seconds)

    def set_serve(self, seconds: float) -> None:
        """Publish how long the last phase of the start took: until API servers were connected."""
        if self._serve is not None:
            self._serve.set(seconds)

    def set_cache_config(self, values: Mapping[str, object]) -> None:
        """Publish the KV cache's configuration as labels of `cache_config_info`."""
        labels = {name: str(value) for name, value in values.items()}
        build = SeriesBuilder(self._prefixes, labels | {"engine": self._engine}, self._registry)
        build.gauge("cache_config_info", "Configuration of the KV cache.").set(1)


class FrontendMetrics:
    """What one API server exports. Series of one engine core are in the order of engines; their label is its rank.

    The HTTP series carry no namespace and exist whatever `namespaces` says.
    """

    def __init__(
        self,
        model_name: str,
        num_engines: int,
        max_model_len: int,
        namespaces: Sequence[str] = ("tokenmill",),
        registry: CollectorRegistry | None = None,
        first_rank: int = 0,
    ) -> None:
        """`first_rank`: of engine 0."""
        _reserve_files(num_engines, len(namespaces))
        registry = registry or CollectorRegistry()
        prefixes = _prefixes(namespaces)
        engines = [{"engine": str(first_rank + engine)} for engine in range(num_engines)]
        build = SeriesBuilder(prefixes, {"model_name": model_name}, registry)
        self.time_to_first_token = build.histograms(
            "time_to_first_token_seconds",
            "From arrival of the HTTP request to its first token.",
            TIME_TO_FIRST_TOKEN_BUCKETS,
            engines,
        )
        self.inter_token_latency = build.histograms(
            "inter_token_latency_seconds", "Between two outputs of a request.", TOKEN_LATENCY_BUCKETS, engines
        )
        self.request_time_per_output_token = build.histograms(
            "request_time_per_output_token_seconds",
            "Mean time per output token of a request, after the first.",
            TOKEN_LATENCY_BUCKETS,
            engines,
        )
        self.e2e_request_latency = build.histograms(
            "e2e_request_latency_seconds",
            "From arrival of the HTTP request to its last token.",
            REQUEST_LATENCY_BUCKETS,
            engines,
        )
        self.request_params_n = build.histograms("request_params_n", "n of a request.", PARAMS_N_BUCKETS, engines)
        self.request_max_num_generation_tokens = build.histograms(
            "request_max_num_generation_tokens",
            "Tokens generated for the longest choice of a request.",
            token_count_buckets(max_model_len),
            engines,
        )
        self._sent_bytes = build.counters(
            "engine_message_bytes_total", "Bytes of messages to an engine core, pixels included.", engines
        )
        self.lost_requests = build.counters(
            *_REQUEST_SUCCESS, [engine | {"finished_reason": str(FinishReason.ERROR)} for engine in engines]
        )
        """Requests that ended with their engine core: what it has counted stays, and it cannot count these."""
        self._add_media(SeriesBuilder(prefixes, {"model_name": model_name, "engine": str(first_rank)}, registry))
        rejections = SeriesBuilder(prefixes, {}, registry).counters(
            "admission_rejections_total",
            "Requests refused because --max-num-queued-reqs or --max-num-queued-tokens was reached.",
            [{"reason": reason} for reason in _REJECTION_REASONS],
        )
        self._admission_rejections = dict(zip(_REJECTION_REASONS, rejections, strict=True))
        self._add_http(registry)

    def _add_media(self, first: SeriesBuilder) -> None:
        """On the first engine core: an item is looked up before one is chosen."""
        self._mm_cache_queries = first.counter(
            "mm_cache_queries_total",
            "Media looked up in a cache of prepared ones; all are counted on the first engine.",
        )
        self._mm_cache_hits = first.counter(
            "mm_cache_hits_total", "Media found there, or just being prepared for another request."
        )

    def _add_http(self, registry: CollectorRegistry) -> None:
        self._http_requests = Counter(
            "http_requests_total", "HTTP requests.", ("handler", "method", "status"), registry=registry
        )
        self._http_series: dict[tuple[str, str, str], tuple[CounterSeries, BatchHistogram]] = {}
        """By handler, method and status; to look labels up takes as long as to count."""
        self._http_duration = BatchHistogram(
            "http_request_duration_seconds",
            "Duration of HTTP requests.",
            ("handler", "method"),
            registry=registry,
            buckets=HTTP_DURATION_BUCKETS,
        )

    def count_sent(self, engine: int, num_bytes: int) -> None:
        """A message went to an engine core."""
        self._sent_bytes[engine].inc(num_bytes)

    def count_rejection(self, reason: str) -> None:
        """A request was refused; `reason` is the Python name of the flag that says how many are taken."""
        self._admission_rejections[reason].inc()

    def count_media_lookup(self, was_known: bool) -> None:
        """An image or a video was looked up in a cache of prepared ones."""
        self._mm_cache_queries.inc()
        if was_known:
            self._mm_cache_hits.inc()

    def observe_http(self, handler: str, method: str, status: int, duration_s: float) -> None:
        """One finished HTTP request; `handler` is the route's path template, `none` for unknown paths."""
        key = handler, method, f"{status // 100}xx"
        series = self._http_series.get(key)
        if series is None:
            series = (
                CounterSeries([self._http_requests.labels(*key)]),
                self._http_duration.labels(handler, method),
            )
            self._http_series[key] = series
        requests, duration = series
        requests.inc()
        duration.observe(duration_s)


class LauncherMetrics:
    """What only the parent of engine cores knows of them. Lists are in the order of engines; their label is the rank.
    Written by the launcher alone."""

    def __init__(
        self,
        model_name: str,
        ranks: Sequence[int],
        namespaces: Sequence[str] = ("tokenmill",),
        registry: CollectorRegistry | None = None,
    ) -> None:
        _reserve_files(len(ranks), len(namespaces), histograms=False)
        registry = registry or CollectorRegistry()
        build = SeriesBuilder(_prefixes(namespaces), {"model_name": model_name}, registry)
        engines = [{"engine": str(rank)} for rank in ranks]
        self.engine_up = build.gauges("engine_up", "1 if the engine core is there, stalled or not, else 0.", engines)
        self.engine_stalled = build.gauges(
            "engine_stalled", "1 while the engine core has work but finishes no step, else 0.", engines
        )
        self.engine_restarts = build.counters(
            "engine_restarts_total", "How often the engine core was lost and served again.", engines
        )
