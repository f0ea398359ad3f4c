"""The arithmetic of the serving benchmark: from recorded times to the figures users compare.

Definitions, per successful request (seconds inside, milliseconds in reports):

* TTFT: from sending the request to the first chunk that carries generated output.
* ITL: time between two consecutive tokens, as far as the client can tell them apart: a chunk is one token unless it
  says how many it holds, and tokens that come in one chunk are 0 apart.
* TPOT: (E2EL - TTFT) / (output tokens - 1), for requests with more than one output token.
* E2EL: from sending the request to its last chunk that has a choice (output or finish reason).

Throughputs divide by the wall time of the whole run. Knows nothing of HTTP or of how prompts were made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

LATENCIES = ("ttft", "tpot", "itl", "e2el")


@dataclass(slots=True)
class RequestRecord:
    """What was seen of one request. Times are seconds of `time.perf_counter`."""

    prompt_tokens: int
    max_tokens: int
    start_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    """Arrival of every token; a chunk with output counts as one unless it says how many it holds."""
    num_chunks: int = 0
    """Chunks that carried output."""
    end_s: float = 0.0
    output_tokens: int = 0
    """As the server counted them; else counted with the tokenizer; else the number of chunks."""
    text: str = ""
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.start_s

    @property
    def itl_s(self) -> list[float]:
        return np.diff(np.asarray(self.token_times_s)).tolist() if len(self.token_times_s) > 1 else []

    @property
    def e2el_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def tpot_s(self) -> float:
        """0 for a single token: nothing to wait for after the first."""
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


@dataclass(slots=True, frozen=True)
class Latency:
    """Distribution of one latency in milliseconds; all zero when nothing was measured."""

    mean: float
    median: float
    std: float
    percentiles: dict[float, float]


@dataclass(slots=True, frozen=True)
class SentBytes:
    """What successful requests with images carried."""

    num_images: int
    num_different_images: int
    image_bytes: int
    """Of the image files, before base64."""
    image_pixels: int
    body_bytes: int
    """Of the HTTP bodies."""

    def to_json(self) -> dict[str, int]:
        """Keys of our own: the known benchmark has none."""
        return {
            "total_images": self.num_images,
            "total_different_images": self.num_different_images,
            "total_image_bytes": self.image_bytes,
            "total_image_pixels": self.image_pixels,
            "total_sent_bytes": self.body_bytes,
        }


@dataclass(slots=True, frozen=True)
class Summary:
    """Figures of one run."""

    duration_s: float
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    total_output_chunks: int
    """Fewer than tokens where the server puts several into a chunk, or tokens have no text of their own."""
    num_good: int | None
    """Requests that met every goal of `goodput`; None when no goal was set."""
    max_output_tokens_per_s: float
    """Most tokens seen in any one-second bin of the run."""
    max_concurrent_requests: int
    latencies: dict[str, Latency]
    sent: SentBytes | None = None

    @property
    def request_throughput(self) -> float:
        return self.completed / self.duration_s

    @property
    def request_goodput(self) -> float | None:
        return None if self.num_good is None else self.num_good / self.duration_s

    @property
    def output_throughput(self) -> float:
        return self.total_output_tokens / self.duration_s

    @property
    def total_token_throughput(self) -> float:
        return (self.total_input_tokens + self.total_output_tokens) / self.duration_s

    def to_json(self) -> dict[str, Any]:
        """Keys and units of the known serving benchmark."""
        result: dict[str, Any] = {
            "duration": self.duration_s,
            "completed": self.completed,
            "failed": self.failed,
            "total_input_tokens": self.total_input_tokens,
            "total_output_tokens": self.total_output_tokens,
            "total_output_chunks": self.total_output_chunks,
            "request_throughput": self.request_throughput,
            "request_goodput": self.request_goodput,
            "output_throughput": self.output_throughput,
            "total_token_throughput": self.total_token_throughput,
            "max_output_tokens_per_s": self.max_output_tokens_per_s,
            "max_concurrent_requests": self.max_concurrent_requests,
            **(self.sent.to_json() if self.sent is not None else {}),
        }
        for name, latency in self.latencies.items():
            result[f"mean_{name}_ms"] = latency.mean
            result[f"median_{name}_ms"] = latency.median
            result[f"std_{name}_ms"] = latency.std
            for rank, value in latency.percentiles.items():
                result[f"p{rank:g}_{name}_ms"] = value
        return result


def summarize(
    records: Sequence[RequestRecord],
    duration_s: float,
    percentiles: Sequence[float],
    goals_ms: Mapping[str, float] | None = None,
) -> Summary:
    """Figures over the successful `records`. `goals_ms` maps a name of LATENCIES (not `itl`) to the most a good
    request may take."""
    done = [record for record in records if record.error is None]
    samples_s: dict[str, list[float]] = {
        "ttft": [record.ttft_s for record in done],
        "tpot": [record.tpot_s for record in done if record.output_tokens > 1],
        "itl": [gap for record in done for gap in record.itl_s],
        "e2el": [record.e2el_s for record in done],
    }
    return Summary(
        duration_s=duration_s,
        completed=len(done),
        failed=len(records) - len(done),
        total_input_tokens=sum(record.prompt_tokens for record in done),
        total_output_tokens=sum(record.output_tokens for record in done),
        total_output_chunks=sum(record.num_chunks for record in done),
        num_good=None if not goals_ms else sum(_is_good(record, goals_ms) for record in done),
        max_output_tokens_per_s=_peak_tokens_per_s(done),
        max_concurrent_requests=_peak_concurrency(done),
        latencies={name: _distribution(samples_s[name], percentiles) for name in LATENCIES},
    )


def _distribution(samples_s: list[float], percentiles: Sequence[float]) -> Latency:
    values: NDArray[np.float64] = np.asarray(samples_s or [0.0]) * 1e3
    return Latency(
        mean=float(values.mean()),
        median=float(np.median(values)),
        std=float(values.std()),
        percentiles={rank: float(np.percentile(values, rank)) for rank in percentiles},
    )


def _is_good(record: RequestRecord, goals_ms: Mapping[str, float]) -> bool:
    measured_s = {"ttft": record.ttft_s, "tpot": record.tpot_s, "e2el": record.e2el_s}
    return all(measured_s[name] * 1e3 <= limit for name, limit in goals_ms.items())


def _peak_tokens_per_s(done: Sequence[RequestRecord]) -> float:
    if not done:
        return 0.0
    origin = min(record.start_s for record in done)
    times = np.concatenate([np.asarray(record.token_times_s) for record in done]) - origin
    return float(np.bincount(times.astype(np.int64)).max())


def _peak_concurrency(done: Sequence[RequestRecord]) -> int:
    """Most requests open at one moment; one that ends exactly when another starts does not overlap it."""
    events = sorted([(record.start_s, 1) for record in done] + [(record.end_s, -1) for record in done])
    changes = np.cumsum([change for _, change in events])
    return int(changes.max()) if len(changes) else 0
