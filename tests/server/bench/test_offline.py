"""`bench throughput` and `bench latency` with a real engine, and `bench serve` against a real server."""

import json
from pathlib import Path

import pytest

from tests.support.server import start_server
from tests.support.tiny_models import cached_tiny_model
from tokenmill_server.bench import cli

pytestmark = pytest.mark.slow

ENGINE = ["--device", "cpu", "--dtype", "float32", "--kv-cache-memory-bytes", "16m", "--max-model-len", "128"]


def test_throughput_counts_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result_file = tmp_path / "result.json"
    arguments = ["--num-prompts", "6", "--input-len", "20", "--output-len", "5", "--n", "2"]
    arguments += ["--model", str(cached_tiny_model("llama")), *ENGINE, "--output-json", str(result_file)]
    assert cli.main(["throughput", *arguments]) == 0
    result = json.loads(result_file.read_text())
    assert result["num_requests"] == 6
    assert result["total_output_tokens"] == 6 * 2 * 5
    assert result["total_num_tokens"] == 6 * 20 + 6 * 2 * 5
    assert result["requests_per_second"] == pytest.approx(6 / result["elapsed_time"])
    assert result["tokens_per_second"] == pytest.approx(result["total_num_tokens"] / result["elapsed_time"])
    assert "Throughput: " in capsys.readouterr().out


def test_latency_times_every_iteration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result_file = tmp_path / "result.json"
    arguments = ["--batch-size", "3", "--input-len", "8", "--output-len", "4", "--num-iters-warmup", "1"]
    arguments += ["--num-iters", "5", "--model", str(cached_tiny_model("llama")), *ENGINE]
    assert cli.main(["latency", *arguments, "--output-json", str(result_file)]) == 0
    result = json.loads(result_file.read_text())
    assert len(result["latencies"]) == 5
    assert min(result["latencies"]) > 0
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 5)
    assert min(result["latencies"]) <= result["percentiles"]["50"] <= max(result["latencies"])
    assert "99% percentile latency: " in capsys.readouterr().out


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_serve_against_our_own_server(backend: str, tmp_path: Path) -> None:
    model = str(cached_tiny_model("llama"))
    with start_server(model, *ENGINE, "--served-model-name", "tiny") as server:
        before = server.metric("generation_tokens_total")
        arguments = ["--backend", backend, "--base-url", server.url, "--tokenizer", model, "--num-prompts", "6"]
        arguments += ["--random-input-len", "20", "--random-output-len", "7", "--ignore-eos", "--max-concurrency", "3"]
        arguments += ["--num-warmups", "2", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
        assert cli.main(["serve", *arguments, "--save-detailed", "--ready-check-timeout-sec", "30"]) == 0
        generated = server.metric("generation_tokens_total") - before
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["failed"]) == (6, 0)
    assert result["model_id"] == "tiny"
    assert result["output_lens"] == [7] * 6
    assert generated == 8 * 7
    assert 0 < result["mean_ttft_ms"] < result["mean_e2el_ms"]
