"""A real Prometheus scrapes a server with four API processes and two engine cores under load."""

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.ports import free_port
from tests.support.server import PATIENCE_S, Server, start_server, wait_for
from tokenmill_server.bench import cli as bench

pytestmark = pytest.mark.slow

REPO = Path(__file__).parents[2]
NUM_REQUESTS = 40
INPUT_TOKENS = 24
OUTPUT_TOKENS = 100
LOAD_S = 8.0
"""Answers of OUTPUT_TOKENS at this pace overlap: some are open at every scrape."""
SCRAPE_S = 2
"""Between two scrapes, and how long one may take: a failed one counts, however busy the machine."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_server("--api-server-count", "4", "-dp", "2", "--kv-cache-memory-bytes", "256M") as running:
        yield running


class Prometheus:
    """A Prometheus of its own that scrapes one server, with the rules of deploy/."""

    def __init__(self, target: str, folder: Path) -> None:
        config = yaml.safe_load((REPO / "deploy/prometheus/prometheus.yml").read_text())
        config["global"] = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(REPO / "deploy/prometheus/alerts.yml")]
        config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        address = f"127.0.0.1:{free_port()}"
        arguments = {
            "config.file": folder / "prometheus.yml",
            "storage.tsdb.path": folder / "data",
            "web.listen-address": address,
        }
        self.process = subprocess.Popen(
            ["prometheus", *(f"--{name}={value}" for name, value in arguments.items())],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.http = httpx.Client(base_url=f"http://{address}", trust_env=False, timeout=PATIENCE_S)
        wait_for(self._is_ready, PATIENCE_S, "a ready Prometheus", poll_s=0.1)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Result vector of an instant query."""
        reply = self.http.get("/api/v1/query", params={"query": expression}).json()
        assert reply["status"] == "success", f"{expression}: {reply.get('error')}"
        return list(reply["data"]["result"])

    def value(self, expression: str) -> float:
        """The single number that `expression` comes to."""
        (sample,) = self.query(expression)
        return float(sample["value"][1])

    def close(self) -> None:
        self.http.close()
        self.process.terminate()
        self.process.wait(PATIENCE_S)

    def _is_ready(self) -> bool:
        try:
            return self.http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Has watched a load of exactly NUM_REQUESTS requests from start to end, and beyond."""
    started = Prometheus(server.url.removeprefix("http://"), tmp_path_factory.mktemp("prometheus"))
    wait_for(lambda: started.query("tokenmill:generation_tokens_total"), PATIENCE_S, "a first scrape", poll_s=0.2)
    arguments = ["serve", "--base-url", server.url, "--num-prompts", str(NUM_REQUESTS), "--ignore-eos"]
    arguments += ["--random-input-len", str(INPUT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS)]
    arguments += ["--request-rate", str(NUM_REQUESTS / LOAD_S), "--disable-tqdm"]
    assert bench.main(arguments) == 0
    server.check_idle()
    # An answer is noted a moment after the client has it.
    noted = {"handler": "/v1/completions", "status": "2xx"}
    wait_for(lambda: server.metric("http_requests_total", **noted) == NUM_REQUESTS, PATIENCE_S, "notes of all requests")
    settled = time.time()
    wait_for(lambda: started.value("timestamp(up)") > settled, PATIENCE_S, "a scrape of the settled state", poll_s=0.2)
    yield started
    started.close()


def test_counters_are_exact_over_all_processes(prometheus: Prometheus, server: Server) -> None:
    generated = prometheus.value("sum(tokenmill:generation_tokens_total)")
    assert generated == NUM_REQUESTS * OUTPUT_TOKENS
    requests = prometheus.value('sum(http_requests_total{handler="/v1/completions", status="2xx"})')
    assert requests == NUM_REQUESTS
    ended = prometheus.value('sum(tokenmill:request_success_total{finished_reason="length"})')
    assert ended == NUM_REQUESTS
    for histogram in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert prometheus.value(f"sum(tokenmill:{histogram}_count)") == NUM_REQUESTS
    assert prometheus.value("sum(tokenmill:inter_token_latency_seconds_count)") >= NUM_REQUESTS * (OUTPUT_TOKENS - 1)


def test_every_scrape_succeeded_and_no_counter_ever_fell(prometheus: Prometheus) -> None:
    assert prometheus.value("min_over_time(up[5m])") == 1
    assert prometheus.value("count_over_time(up[5m])") >= LOAD_S / SCRAPE_S
    for name in ("generation_tokens_total", "request_success_total", "e2e_request_latency_seconds_count"):
        assert prometheus.value(f"sum(resets(tokenmill:{name}[5m]))") == 0
    assert prometheus.value("sum(resets(http_requests_total[5m]))") == 0


def test_each_series_is_there_once_per_engine(prometheus: Prometheus) -> None:
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"):
        series = prometheus.query(f"tokenmill:{name}")
        assert sorted(sample["metric"]["engine"] for sample in series) == ["0", "1"]
    assert prometheus.query('{pid!=""}') == []
    assert prometheus.value("count(tokenmill:cache_config_info)") == 2


def test_both_engines_worked_and_rest_now(prometheus: Prometheus) -> None:
    for engine in ("0", "1"):
        assert prometheus.value(f'tokenmill:generation_tokens_total{{engine="{engine}"}}') > 0
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert prometheus.value(f'tokenmill:{gauge}{{engine="{engine}"}}') == 0
    assert prometheus.value("max(max_over_time(tokenmill:num_requests_running[5m]))") >= 1


def test_every_query_of_the_dashboard_has_an_answer(prometheus: Prometheus) -> None:
    dashboard = json.loads((REPO / "deploy/grafana/dashboards/tokenmill.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$__rate_interval", "30s")
            expression = re.sub(r"\$(instance|model|engine)", ".*", expression)
            assert prometheus.query(expression), panel["title"]


def test_rules_are_evaluated_and_nothing_fires(prometheus: Prometheus) -> None:
    (group,) = prometheus.http.get("/api/v1/rules").json()["data"]["groups"]
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    assert [rule["name"] for rule in group["rules"] if rule["state"] == "firing"] == []


def test_promtool_finds_only_what_compatible_names_force(prometheus: Prometheus, server: Server) -> None:
    """promtool's linter dislikes the colon of `tokenmill:` and a histogram called `..._total`; both are vLLM's."""
    text = server.http.get("/metrics").text
    linted = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    findings = [line for line in linted.stderr.splitlines() if "should not contain ':'" not in line]
    assert findings == ['tokenmill:iteration_tokens_total non-counter metrics should not have "_total" suffix']
    renamed = text.replace("tokenmill:iteration_tokens_total", "tokenmill_iteration_tokens")
    subprocess.run(
        ["promtool", "check", "metrics"], input=renamed.replace("tokenmill:", "tokenmill_"), text=True, check=True
    )
