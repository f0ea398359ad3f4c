"""Metrics: every promised series exists from the start, and merging over processes is exact."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from tests.support.exposition import samples
from tokenmill_engine.messages import EngineLoad, FinishReason
from tokenmill_engine.metric_files import render_metrics
from tokenmill_engine.metric_series import BatchHistogram
from tokenmill_engine.metrics import (
    EngineMetrics,
    FrontendMetrics,
    token_count_buckets,
)

ENGINE_SERIES = [
    "num_requests_running",
    "num_requests_waiting",
    'num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"}',
    "kv_cache_usage_perc",
    "num_preemptions_total",
    "mixed_step_token_budget",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prompt_tokens_total",
    "prompt_tokens_by_source_total",
    "prompt_tokens_cached_total",
    "generation_tokens_total",
    *(f'request_success_total{{engine="0",finished_reason="{r}",model_name="m"}}' for r in FinishReason),
    *(
        f"{name}_{part}"
        for part in ("bucket", "sum", "count")
        for name in (
            "iteration_tokens_total",
            "step_time_seconds",
            "request_prompt_tokens",
            "request_generation_tokens",
            "request_params_max_tokens",
            "request_prefill_kv_computed_tokens",
            "request_num_preemptions",
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "request_inference_time_seconds",
        )
    ),
]
FRONTEND_SERIES = [
    'request_success_total{engine="1",finished_reason="error",model_name="m"}',
    "admission_rejections_total",
    *(
        f"{name}_{part}"
        for part in ("bucket", "sum", "count")
        for name in (
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "request_time_per_output_token_seconds",
            "e2e_request_latency_seconds",
            "request_params_n",
            "request_max_num_generation_tokens",
        )
    ),
]


def scrape(registry: CollectorRegistry) -> dict[str, float]:
    return samples(generate_latest(registry).decode())


@pytest.mark.parametrize("namespaces", [("tokenmill",), ("vllm",), ("tokenmill", "vllm")])
def test_every_series_exists_at_zero_under_every_namespace(namespaces: tuple[str, ...]) -> None:
    engine, frontend = CollectorRegistry(), CollectorRegistry()
    EngineMetrics("m", 0, 8192, namespaces, engine)
    FrontendMetrics("m", 2, 8192, namespaces, frontend)
    values = scrape(engine) | scrape(frontend)
    for namespace in ("tokenmill", "vllm"):
        for name in (*ENGINE_SERIES, *FRONTEND_SERIES):
            found = [series for series in values if series.startswith(f"{namespace}:{name}")]
            assert bool(found) == (namespace in namespaces), name
            assert not any(values[series] for series in found if "_created" not in series)
    assert any('engine="1"' in series for series in values)


def test_without_a_namespace_there_are_no_series_of_ours() -> None:
    registry = CollectorRegistry()
    engine, frontend = EngineMetrics("m", 0, 8192, (), registry), FrontendMetrics("m", 1, 8192, (), registry)
    engine.set_load(EngineLoad(1, 2, 0.5))
    engine.count_finish(FinishReason.STOP)
    engine.set_startup({"load": 1.0})
    engine.set_serve(0.5)
    frontend.inter_token_latency[0].observe_many([0.1])
    frontend.observe_http("/v1/models", "GET", 200, 0.01)
    assert not [series for series in scrape(registry) if ":" in series.split("{")[0]]
    assert 'http_requests_total{handler="/v1/models",method="GET",status="2xx"}' in scrape(registry)


def test_engine_values() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics("m", 1, 8192, ("tokenmill",), registry)
    metrics.set_load(EngineLoad(3, 2, 0.25))
    metrics.count_prefill(100, 32)
    metrics.count_finish(FinishReason.LENGTH)
    metrics.set_cache_config({"block_size": 16, "num_gpu_blocks": 99})
    metrics.set_startup({"launch": 0.5, "load": 2.25})
    metrics.set_serve(0.125)
    values = scrape(registry)
    labels = 'engine="1",model_name="m"'
    assert values[f'tokenmill:startup_seconds{{{labels},phase="launch"}}'] == 0.5
    assert values[f'tokenmill:startup_seconds{{{labels},phase="load"}}'] == 2.25
    assert values[f'tokenmill:startup_seconds{{{labels},phase="serve"}}'] == 0.125
    assert values[f"tokenmill:num_requests_running{{{labels}}}"] == 3
    assert values[f"tokenmill:num_requests_waiting{{{labels}}}"] == 2
    assert values[f'tokenmill:num_requests_waiting_by_reason{{{labels},reason="capacity"}}'] == 2
    assert values[f"tokenmill:kv_cache_usage_perc{{{labels}}}"] == 0.25
    assert values[f"tokenmill:prompt_tokens_total{{{labels}}}"] == 100
    assert values[f'tokenmill:prompt_tokens_by_source_total{{{labels},source="local_cache_hit"}}'] == 32
    assert values[f'tokenmill:prompt_tokens_by_source_total{{{labels},source="local_compute"}}'] == 68
    assert values['tokenmill:request_success_total{engine="1",finished_reason="length",model_name="m"}'] == 1
    assert values['tokenmill:cache_config_info{block_size="16",engine="1",num_gpu_blocks="99"}'] == 1


@pytest.mark.parametrize("repeats", [1, 9])
def test_many_observations_at_once_equal_single_ones(repeats: int) -> None:
    buckets = (0.1, 0.5, 1.0)
    values = [0.0, 0.1, 0.100001, 0.5, 0.7, 1.0, 3.0, 3.0] * repeats
    registries = CollectorRegistry(), CollectorRegistry()
    many = BatchHistogram("h", "help", registry=registries[0], buckets=buckets)
    single = Histogram("h", "help", registry=registries[1], buckets=buckets)
    many.observe_many(values)
    many.observe_many([])
    for value in values:
        single.observe(value)
    first, second = (scrape(registry) for registry in registries)
    assert {k: v for k, v in first.items() if "created" not in k} == pytest.approx(
        {k: v for k, v in second.items() if "created" not in k}
    )
    assert first["h_count"] == len(values)
    many.observe_many(np.array([0.2]))
    assert scrape(registries[0])["h_count"] == len(values) + 1


def test_an_observation_is_that_of_the_library() -> None:
    registries = CollectorRegistry(), CollectorRegistry()
    ours = BatchHistogram("h", "help", registry=registries[0], buckets=(0.1, 1.0))
    theirs = Histogram("h", "help", registry=registries[1], buckets=(0.1, 1.0))
    for value in (0.0, 0.1, 0.2, 1.0, 1.5, float("inf")):
        ours.observe(value)
        theirs.observe(value)
        first, second = ({k: v for k, v in scrape(each).items() if "created" not in k} for each in registries)
        assert first == second


def test_token_buckets_are_a_1_2_5_series_up_to_the_limit() -> None:
    assert token_count_buckets(250) == (1, 2, 5, 10, 20, 50, 100, 200)
    assert token_count_buckets(1) == (1,)


@pytest.mark.parametrize("metrics", ["EngineMetrics('m', 0, 4096)", "FrontendMetrics('m', 2, 4096)"])
def test_files_have_all_their_space_from_the_start(metrics: str, tmp_path: Path) -> None:
    """A page that is missing when the disk is full is a SIGBUS."""
    script = f"from tokenmill_engine.metrics import *; {metrics}"
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    files = {path.name.rpartition("_")[0]: path.stat() for path in tmp_path.iterdir()}
    assert set(files) == {"counter", "gauge_mostrecent", "histogram"}
    for status in files.values():
        assert status.st_blocks * 512 >= status.st_size >= 256 << 10
    assert render_metrics(str(tmp_path))
