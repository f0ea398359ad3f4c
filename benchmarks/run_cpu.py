"""The CPU benchmark of benchmarks/README.md: SmolLM2 in bfloat16, 256 tokens in, 64 out, all prompts at once.

Starts a server, or measures one that runs already (`--base-url`), for a peer beside ours in the same run:

    .venv/bin/python benchmarks/run_cpu.py
    .venv/bin/python benchmarks/run_cpu.py --base-url http://127.0.0.1:9000 --model NAME

Prints a table row and writes every figure to a JSON file in benchmarks/results.
"""

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from tokenmill_engine.config.model_files import EMBEDDED_MODEL_NAME

RESULTS = Path(__file__).parent / "results"
TOKENMILL = str(Path(sys.executable).parent / "tokenmill")
START_TIMEOUT_S = 300


def main() -> None:
    options = _options()
    figures: dict[str, Any] = {"date": datetime.now().isoformat(timespec="seconds"), "machine": _machine()}
    if options.base_url is not None:
        figures |= _measure(options.base_url, options.model, options.repeats, None)
    else:
        with _server(options.server_args) as (url, process, startup_s):
            figures["first_answer_s"] = startup_s
            figures |= _measure(url, options.model, options.repeats, process)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"cpu-{options.tag}-{datetime.now():%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps(figures, indent=2) + "\n")
    sys.stdout.write(json.dumps(figures, indent=2) + f"\n{path}\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="CPU benchmark", allow_abbrev=False)
    parser.add_argument("--base-url", help="measure this server; default: start one")
    parser.add_argument("--model", default=EMBEDDED_MODEL_NAME, help="its name for the model")
    parser.add_argument("--repeats", type=int, default=5, help="runs per figure; the median counts")
    parser.add_argument("--tag", default="tokenmill", help="part of the result's file name")
    parser.add_argument("server_args", nargs="*", help="flags for the server, after --")
    return parser.parse_args()


def _machine() -> dict[str, Any]:
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    return {
        "cpu": model.partition(":")[2].strip() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


@contextmanager
def _server(flags: list[str]) -> Iterator[tuple[str, psutil.Process, float]]:
    """(base URL, launcher, seconds from exec to the first answered chat) of a server that ends with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started_s = time.monotonic()
    process = psutil.Popen([TOKENMILL, "serve", "--port", str(port), "--dtype", "bfloat16", *flags])
    try:
        url = f"http://127.0.0.1:{port}"
        while not _chat_works(url):
            if process.poll() is not None or time.monotonic() > started_s + START_TIMEOUT_S:
                raise SystemExit("the server did not start")
            time.sleep(0.02)
        yield url, process, time.monotonic() - started_s
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _chat_works(url: str) -> bool:
    body = {"model": EMBEDDED_MODEL_NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def _measure(url: str, model: str, repeats: int, launcher: psutil.Process | None) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    _bench(url, model, 0, (4, 256, 16))
    for concurrency in (1, 8, 32):
        runs, cpu_us = [], []
        for repeat in range(repeats):
            before_s = _api_server_cpu_s(launcher)
            run = _bench(url, model, 100 * concurrency + repeat, (concurrency, 256, 64))
            runs.append(run)
            cpu_us.append((_api_server_cpu_s(launcher) - before_s) * 1e6 / run["total_output_tokens"])
        row = {
            "output_tok_s": _median(runs, "output_throughput"),
            "ttft_ms": _median(runs, "median_ttft_ms"),
            "itl_ms": _median(runs, "median_itl_ms"),
            "itl_p99_ms": _median(runs, "p99_itl_ms"),
        }
        if launcher is not None:
            row["api_server_cpu_us_per_token"] = statistics.median(cpu_us)
        figures[f"c{concurrency}"] = row
    long = [_bench(url, model, 9000 + i, (1, 1500, 4)) for i in range(repeats)]
    figures["ttft_1500_ms"] = _median(long, "median_ttft_ms")
    figures["prefix_gain"] = _prefix_gain(url, model, repeats)
    if launcher is not None:
        figures["api_server_rss_mb"] = max(p.memory_info().rss for p in _api_servers(launcher)) / 2**20
    return figures


def _prefix_gain(url: str, model: str, repeats: int) -> float:
    """First-token time of a new 1000-token prefix by that of the same prefix with another ending."""
    gains: list[float] = []
    for repeat in range(repeats):
        # One at a time: the first request fills the cache, the second finds its prefix there.
        run = _bench(url, model, 5000 + repeat, (2, 16, 4), "--random-prefix-len", "1000", "--max-concurrency", "1")
        gains.append(run["ttfts"][0] / run["ttfts"][1])
    return statistics.median(gains)


def _bench(url: str, model: str, seed: int, shape: tuple[int, int, int], *more: str) -> dict[str, Any]:
    """Result of one benchmark run; `shape` is (prompts, input length, output length)."""
    prompts, input_len, output_len = shape
    with tempfile.TemporaryDirectory() as folder:
        command = [TOKENMILL, "bench", "serve", "--base-url", url, "--model", model, "--tokenizer", EMBEDDED_MODEL_NAME]
        command += ["--num-prompts", str(prompts), "--random-input-len", str(input_len), "--ignore-eos"]
        command += ["--random-output-len", str(output_len), "--seed", str(seed), "--disable-tqdm", *more]
        command += ["--save-detailed", "--result-dir", folder, "--result-filename", "result.json"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
    if result["completed"] != prompts:
        raise SystemExit(f"{result['failed']} of {prompts} requests failed")
    return result


def _median(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.median([float(run[key]) for run in runs])


def _api_servers(launcher: psutil.Process) -> list[psutil.Process]:
    return [child for child in launcher.children() if "tokenmill: api server" in " ".join(child.cmdline())]


def _api_server_cpu_s(launcher: psutil.Process | None) -> float:
    if launcher is None:
        return 0.0
    times = [process.cpu_times() for process in _api_servers(launcher)]
    return sum(time.user + time.system for time in times)


if __name__ == "__main__":
    main()
