"""The benchmark's text report."""

import math
from collections.abc import Sequence

from tokenmill_server.bench.metrics import Summary

_TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
_WIDTH = 50


def format_summary(
    summary: Summary, shown: Sequence[str], request_rate: float = math.inf, max_concurrency: int | None = None
) -> str:
    """The report as text; `shown` names the latencies to print."""
    lines = [
        " Serving Benchmark Result ".center(_WIDTH, "="),
        _count("Successful requests:", summary.completed),
        _count("Failed requests:", summary.failed),
    ]
    if max_concurrency is not None:
        lines.append(_count("Maximum request concurrency:", max_concurrency))
    if not math.isinf(request_rate):
        lines.append(_value("Request rate configured (RPS):", request_rate))
    lines += [
        _value("Benchmark duration (s):", summary.duration_s),
        _count("Total input tokens:", summary.total_input_tokens),
        _count("Total generated tokens:", summary.total_output_tokens),
        _value("Request throughput (req/s):", summary.request_throughput),
    ]
    if summary.sent is not None:
        lines[-1:-1] = [
            _count("Total images:", summary.sent.num_images),
            _count("Different images:", summary.sent.num_different_images),
            _value("Image files (MB):", summary.sent.image_bytes / 1e6),
            _value("Sent (MB):", summary.sent.body_bytes / 1e6),
            _value("Sent (MB/s):", summary.sent.body_bytes / 1e6 / summary.duration_s),
        ]
    if summary.request_goodput is not None:
        lines.append(_value("Request goodput (req/s):", summary.request_goodput))
    lines += [
        _value("Output token throughput (tok/s):", summary.output_throughput),
        _value("Peak output token throughput (tok/s):", summary.max_output_tokens_per_s),
        _count("Peak concurrent requests:", summary.max_concurrent_requests),
        _value("Total token throughput (tok/s):", summary.total_token_throughput),
    ]
    for name in shown:
        short, title = _TITLES[name]
        latency = summary.latencies[name]
        lines += [
            title.center(_WIDTH, "-"),
            _value(f"Mean {short} (ms):", latency.mean),
            _value(f"Median {short} (ms):", latency.median),
            *(_value(f"P{rank:g} {short} (ms):", value) for rank, value in latency.percentiles.items()),
        ]
    lines.append("=" * _WIDTH)
    return "\n".join(lines) + "\n"


def _count(label: str, value: int) -> str:
    return f"{label:<40} {value:<10d}".rstrip()


def _value(label: str, value: float) -> str:
    return f"{label:<40} {value:<10.2f}".rstrip()
