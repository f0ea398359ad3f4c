"""Whether what docs/tuning.md says against preemptions helps: `python -m benchmarks.preemption`, from the root.

Starts a server whose KV cache is too small for its load, then one with each remedy, and sends all of them the same
requests over HTTP. Preemptions and the tokens of all steps come from /metrics, latencies from `tokenmill bench serve`.
The counts tell whether a remedy helps; what it costs in speed on a CPU says nothing about GPUs. `--setting gpu` has
sizes for an 8B shape (`--model`), and wants two cards for the remedies that spread a model.
"""

import argparse
import os
import re
import signal
import sys
import tempfile
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tokenmill_engine.config.device import detect_device
from tokenmill_engine.config.model_files import embedded_model_path, resolve_model
from tokenmill_engine.errors import ConfigError, TokenmillError
from tokenmill_server.bench.compare_plan import Load
from tokenmill_server.bench.compare_process import Log, Program
from tokenmill_server.bench.compare_sides import Deadline, Model, RunningServer, free_port, started_server

Flags = Mapping[str, str]

_SCRAPE_S = 60.0


@dataclass(slots=True, frozen=True)
class Setting:
    """Flags of a server that preempts under a load, and what to change in them, by what it is called."""

    base: Flags
    remedies: Mapping[str, Flags]
    load: Load

    def variants(self) -> Iterator[tuple[str, dict[str, str]]]:
        """(name, flags) of the server as it is, then of one with each remedy."""
        yield "as it is", dict(self.base)
        for name, flags in self.remedies.items():
            yield name, {**self.base, **flags}


def _share(num_bytes: float) -> str:
    """For --gpu-memory-utilization, whatever the size of the card."""
    return f"{min(num_bytes / detect_device().total_memory_bytes, 0.95):.3f}"


SETTINGS = {
    "cpu": Setting(
        {"device": "cpu", "kv-cache-memory-bytes": "56M", "max-num-seqs": "16"},
        {
            "more cache": {"kv-cache-memory-bytes": "128M"},
            "fewer requests at once": {"max-num-seqs": "8"},
            "fewer tokens in a step": {"max-num-batched-tokens": "16"},
            "pipeline parallel, 2": {"pipeline-parallel-size": "2"},
            "pipeline parallel, 3": {"pipeline-parallel-size": "3"},
            "tensor parallel, 3": {"tensor-parallel-size": "3"},
            "data parallel, 2": {"data-parallel-size": "2"},
        },
        Load("16 clients 192/96", "serve", 96, 192, 96, 16, warms_up=False),
    ),
    "gpu": Setting(
        {
            "load-format": "dummy",
            "max-model-len": "8192",
            "gpu-memory-utilization": _share(23e9),
            "max-num-seqs": "128",
        },
        {
            "more cache": {"gpu-memory-utilization": _share(38e9)},
            "fewer requests at once": {"max-num-seqs": "64"},
            "fewer tokens in a step": {"max-num-batched-tokens": "128"},
            "pipeline parallel, 2": {"pipeline-parallel-size": "2"},
            "tensor parallel, 2": {"tensor-parallel-size": "2"},
            "data parallel, 2": {"data-parallel-size": "2"},
        },
        Load("128 clients 256/256", "serve", 384, 256, 256, 128, warms_up=False),
    ),
}


@dataclass(slots=True, frozen=True)
class Outcome:
    """What became of the load on one server."""

    cache_tokens: int
    """Of the KV caches of all engine cores together."""
    preemptions: int
    recomputed_tokens: int
    """Computed in steps beyond once for every token; what the prefix cache gave back of a preempted request is not."""
    figures: Mapping[str, float]
    """Of `bench serve`."""


def measure(model: Model, flags: Flags, load: Load, limit_s: float = 600.0) -> Outcome:
    """Starts a server, sends it `load`, and ends it.

    Raises: SideError.
    """
    port, deadline = free_port(), Deadline(limit_s)
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "tokenmill", "serve", str(model.path), "--served-model-name", "m", *words]
    prompts = ["--prompt-format", "ids", "--vocab-size", str(model.vocab_size), "--tokenizer", str(model.path)]
    with tempfile.TemporaryDirectory(prefix="tokenmill-preemption-") as folder:
        server = RunningServer(port, model, "m", deadline, prompts)
        address = ["--host", "127.0.0.1", "--port", str(port)]
        with started_server(Program([*command, *address], os.environ), Log(Path(folder) / "log"), server):
            before = _Counts(port)
            figures = server.measure(load, seed=1)
            after = _Counts(port)
    once = load.num_prompts * (load.input_len + load.output_len - 1)
    return Outcome(
        cache_tokens=after.cache_tokens,
        preemptions=round(after.preemptions - before.preemptions),
        recomputed_tokens=round(after.computed_tokens - before.computed_tokens) - once,
        figures=figures,
    )


class _Counts:
    """What /metrics says now, summed over engine cores."""

    def __init__(self, port: int) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=_SCRAPE_S) as reply:
            self._page = reply.read().decode()
        self.preemptions = self._sum(r"tokenmill:num_preemptions_total{.*} (\S+)")
        self.computed_tokens = self._sum(r"tokenmill:iteration_tokens_total_sum{.*} (\S+)")
        self.cache_tokens = round(self._sum(r'tokenmill:cache_config_info{.*kv_cache_size_tokens="(\d+)".*} \S+'))

    def _sum(self, series: str) -> float:
        return sum(float(value) for value in re.findall(f"^{series}$", self._page, re.MULTILINE))


def read_model(path: Path) -> Model:
    """Raises: ConfigError."""
    files = resolve_model(str(path))
    return Model(Path(files.path).resolve(), files.architecture.vocab_size, files.architecture.max_position_embeddings)


def _table(model: Model, setting: Setting, variants: Iterable[tuple[str, Flags]]) -> Iterator[str]:
    """A line for each server as soon as it is measured. Raises: SideError."""
    columns = ("server", "changed flags", "cache, tokens", "preemptions", "recomputed tokens", "out tok/s")
    yield f"| {' | '.join(columns)} | TTFT p50 / p99 ms | ITL p50 / p99 ms |"
    yield "|---" * (len(columns) + 2) + "|"
    for name, flags in variants:
        outcome = measure(model, flags, setting.load)
        changed = " ".join(f"`--{key} {value}`" for key, value in flags.items() if setting.base.get(key) != value)
        counts = f"{outcome.cache_tokens} | {outcome.preemptions} | {outcome.recomputed_tokens}"
        told = outcome.figures
        first, between = (f"{told[f'p50_{key}_ms']:.0f} / {told[f'p99_{key}_ms']:.0f}" for key in ("ttft", "itl"))
        yield f"| {name} | {changed} | {counts} | {told['output_throughput']:.0f} | {first} | {between} |"


def _selected(setting: Setting, texts: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """The servers with one of `texts` in their name; none means all. Raises: ConfigError."""
    variants = list(setting.variants())
    for text in texts:
        if not any(text in name for name, _ in variants):
            raise ConfigError(f"--only {text}: no server is called so; there are: {'; '.join(dict(variants))}")
    return [each for each in variants if not texts or any(text in each[0] for text in texts)]


def _stop(number: int, _frame: FrameType | None) -> None:
    """SIGTERM ends us like an exception, so that no server is left behind; a second one must not end that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> int:
    """Measures and prints; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.preemption", description=__doc__)
    parser.add_argument("--setting", choices=SETTINGS, default="cpu")
    parser.add_argument("--model", type=Path, help="folder or .gguf; default: the embedded model")
    parser.add_argument("--only", action="append", default=[], help="servers with this in their name; repeatable")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _stop)
    setting = SETTINGS[args.setting]
    try:
        variants = _selected(setting, args.only)
        model = read_model(args.model or embedded_model_path())
        base = " ".join(f"--{key} {value}" for key, value in setting.base.items())
        print(f"{setting.load.name}, {setting.load.num_prompts} requests; {base}", flush=True)  # noqa: T201 - the result
        for line in _table(model, setting, variants):
            print(line, flush=True)  # noqa: T201
    except TokenmillError as error:
        sys.stderr.write(f"{parser.prog}: error: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
