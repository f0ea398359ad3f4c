"""`benchmarks/structured.py` over a server of a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.structured import fields_by_kind, summary
from tests.support.tiny_models import cached_tiny_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_it_compares_kinds_with_as_many_tokens() -> None:
    flags = "--device cpu --dtype float32 --kv-cache-memory-bytes 64M"
    command = [
        sys.executable,
        "-m",
        "benchmarks.structured",
        "--model",
        str(cached_tiny_model("llama")),
        "--flags",
        flags,
    ]
    command += ["--rounds", "2", "--num-prompts", "8", "--concurrency", "2", "--input-len", "8", "--output-len", "24"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["figures"].keys() == fields_by_kind(1).keys()
    assert told["by_free"].keys() == {"json_schema", "json_records", "logprobs"}
    for ratios in told["by_free"].values():
        # Tokens that come together have no time between them.
        assert all(value > 0 or (name.endswith("itl_ms") and value == 0) for name, value in ratios.items())


def test_ratios_are_of_the_same_round() -> None:
    """A machine that gets slower from round to round changes no ratio."""
    names = ("output_throughput", "median_itl_ms", "p99_itl_ms", "median_ttft_ms", "server_cpu_s")
    rounds = {
        kind: [dict.fromkeys(names, speed * share) for speed in (100.0, 10.0, 1.0)]
        for kind, share in (("free", 1.0), ("json_schema", 0.5))
    }
    assert summary(rounds)["by_free"] == {"json_schema": dict.fromkeys(names, 0.5)}
    assert summary(rounds)["figures"]["json_schema"] == dict.fromkeys(names, 5.0)
