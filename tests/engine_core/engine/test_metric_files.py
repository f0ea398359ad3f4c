"""Metric files of several processes: merging is exact, also over dead and restarted ones, and says what each costs."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from tests.support.exposition import samples
from tokenmill_engine.metric_files import render_metrics, retire_process

_WORKER = """
import os, sys
from tokenmill_engine.metrics import EngineMetrics, FrontendMetrics
from tokenmill_engine.messages import EngineLoad, FinishReason
kind = sys.argv[1]
if kind == "engine":
    metrics = EngineMetrics("m", 0, 1000, ("tokenmill", "vllm"))
    metrics.set_load(EngineLoad(5, 1, 0.5))
    metrics.generation_tokens.inc(7)
    metrics.iteration_tokens.observe(12)
    metrics.set_load(EngineLoad(2, 0, 0.25))
else:
    metrics = FrontendMetrics("m", 2, 1000, ("tokenmill", "vllm"))
    for _ in range(int(kind)):
        metrics.observe_http("/v1/completions", "POST", 200, 0.2)
        metrics.time_to_first_token[1].observe(0.03)
    metrics.inter_token_latency[0].observe_many([0.02] * int(kind))
print("done", flush=True)
sys.stdin.read()
"""


def run_worker(directory: Path, kind: str) -> int:
    """The number of a process that wrote its metrics and was then killed the hard way."""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(directory)}
    command = [sys.executable, "-c", _WORKER, kind]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "done\n"
        worker.send_signal(signal.SIGKILL)
    return worker.pid


def test_values_of_dead_and_restarted_processes_add_up_exactly(tmp_path: Path) -> None:
    for kind in ("engine", "3", "4", "2"):
        run_worker(tmp_path, kind)
    (tmp_path / "counter_99999.db").touch()  # a process that is just starting
    text = render_metrics(str(tmp_path)).decode()
    values = samples(text)
    assert "pid" not in text
    assert values['http_requests_total{handler="/v1/completions",method="POST",status="2xx"}'] == 9
    for namespace in ("tokenmill", "vllm"):
        engine = '{engine="0",model_name="m"}'
        assert values[f"{namespace}:num_requests_running{engine}"] == 2
        assert values[f"{namespace}:num_requests_waiting{engine}"] == 0
        assert values[f"{namespace}:kv_cache_usage_perc{engine}"] == 0.25
        assert values[f"{namespace}:generation_tokens_total{engine}"] == 7
        assert values[f"{namespace}:num_preemptions_total{engine}"] == 0
        assert values[f"{namespace}:iteration_tokens_total_count{engine}"] == 1
        assert values[f"{namespace}:inter_token_latency_seconds_count{engine}"] == 9
        assert values[f'{namespace}:inter_token_latency_seconds_bucket{{engine="0",le="0.025",model_name="m"}}'] == 9
        assert values[f'{namespace}:time_to_first_token_seconds_count{{engine="1",model_name="m"}}'] == 9
        assert values[f'{namespace}:time_to_first_token_seconds_sum{{engine="1",model_name="m"}}'] == pytest.approx(
            0.27
        )
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    assert types["tokenmill:num_requests_running"] == "gauge"
    assert types["tokenmill:generation_tokens_total"] == "counter"
    assert types["tokenmill:iteration_tokens_total"] == "histogram"


RUNNING = 'tokenmill:num_requests_running{engine="0",model_name="m"}'


def test_a_retired_process_keeps_its_counts_and_loses_its_gauges(tmp_path: Path) -> None:
    pids = [run_worker(tmp_path, kind) for kind in ("engine", "3")]
    before = samples(render_metrics(str(tmp_path)).decode())
    reserved = sum(path.stat().st_size for path in tmp_path.iterdir())
    for pid in (*pids, *pids, 999999):
        retire_process(str(tmp_path), pid)
    after = samples(render_metrics(str(tmp_path)).decode())
    assert RUNNING in before
    assert RUNNING not in after
    assert not [name for name in set(before) - set(after) if not re.search("running|waiting|usage|budget", name)]
    assert {name: before[name] for name in after} == after
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < reserved / 5
    run_worker(tmp_path, "engine")
    again = samples(render_metrics(str(tmp_path)).decode())
    assert again[RUNNING] == 2
    assert again['tokenmill:generation_tokens_total{engine="0",model_name="m"}'] == 14


def test_a_process_that_is_retired_during_a_scrape_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = run_worker(tmp_path, "engine")
    merge = MultiProcessCollector.merge

    def retire_first(paths: list[str]) -> Iterable[Metric]:
        retire_process(str(tmp_path), pid)
        return merge(paths)

    monkeypatch.setattr(MultiProcessCollector, "merge", retire_first)
    values = samples(render_metrics(str(tmp_path)).decode())
    assert RUNNING not in values
    assert values['tokenmill:generation_tokens_total{engine="0",model_name="m"}'] == 7


_LAUNCHER = """
import json, os, subprocess, sys
from pathlib import Path
from tokenmill_engine.metric_files import render_metrics
folder, titled, *titles = sys.argv[1:]
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
children = [subprocess.Popen([sys.executable, "-c", titled, title], **pipes) for title in titles]
for child in children:
    child.stdout.readline()
for child in children[:3]:  # workers write no metrics
    Path(folder, f"counter_{child.pid}.db").touch()
pages = [render_metrics(folder, os.getpid(), has_workers=each).decode() for each in (True, False)]
print(json.dumps([pages, children[0].pid]), flush=True)
sys.stdin.read()
for child in children:
    child.communicate()
"""
_TITLED = """
import setproctitle, sys, time
setproctitle.setproctitle(sys.argv[1])
list(range(3_000_000))
print("done", flush=True)
sys.stdin.read()
"""


def test_each_living_process_of_a_server_says_what_it_costs(tmp_path: Path) -> None:
    """By its role, not by its number; strangers that have the number of a dead one are left out."""
    titles = ["tokenmill: engine core 0", "tokenmill: api server 0", "stranger", "tokenmill: worker 0.1"]
    # Whose children are these alone: servers of other tests may be children of this process.
    command = [sys.executable, "-c", _LAUNCHER, str(tmp_path), _TITLED, *titles]
    launcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert launcher.stdout is not None
        pages, engine_pid = json.loads(launcher.stdout.readline())
        for has_workers, page in zip((True, False), pages, strict=True):
            values = samples(page)
            roles = {match[1] for name in values if (match := re.search(r'process="([^"]*)"', name))}
            assert roles == {"engine core 0", "api server 0", *(["worker 0.1"] if has_workers else [])}
        engine = psutil.Process(engine_pid)
        label = '{process="engine core 0"}'
        assert values[f"process_start_time_seconds{label}"] == pytest.approx(engine.create_time(), abs=1)
        assert values[f"process_resident_memory_bytes{label}"] == pytest.approx(engine.memory_info().rss, rel=0.2)
        assert values[f"process_virtual_memory_bytes{label}"] > values[f"process_resident_memory_bytes{label}"]
        assert 0 < values[f"process_cpu_seconds_total{label}"] <= sum(engine.cpu_times()[:2]) + 0.1
        assert values[f"process_open_fds{label}"] == engine.num_fds()
        assert values[f"process_max_fds{label}"] >= 3
        assert any(name.startswith("python_info{") for name in values)
    finally:
        launcher.communicate()


def test_a_launcher_that_is_not_ours_is_left_out(tmp_path: Path) -> None:
    assert "process_open_fds{" not in render_metrics(str(tmp_path), os.getpid()).decode()


def test_files_that_grow_keep_what_is_counted_before_and_after(tmp_path: Path) -> None:
    script = """
from prometheus_client import CollectorRegistry
from tokenmill_engine.metric_series import SeriesBuilder
build = SeriesBuilder(["p:"], {"of": "x"}, CollectorRegistry())
counter, histogram = build.counter("c_total", "help"), build.histogram("h", "help", (0.1, 1.0))
for turn in range(2):
    counter.inc(2.5)
    histogram.observe(0.5)
    histogram.observe_many([0.05, 0.5, 4.0])
    for number in range(2000):
        build.counter(f"c{turn}_{number}_total", "help" * 20).inc()
        build.histogram(f"h{turn}_{number}", "help" * 20, (1.0,)).observe(2.0)
"""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    values = samples(render_metrics(str(tmp_path)).decode())
    assert values['p:c_total{of="x"}'] == 5
    assert [values[f'p:h_bucket{{le="{bound}",of="x"}}'] for bound in ("0.1", "1.0", "+Inf")] == [2, 6, 8]
    assert values['p:h_sum{of="x"}'] == pytest.approx(10.1)
    assert values['p:c1_1999_total{of="x"}'] == 1
    assert values['p:h0_1999_sum{of="x"}'] == 2
