"""The scheduler benchmark: what a step costs the engine core's host. It runs in a process of the engine's own."""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tokenmill_engine.errors import StartupError
from tokenmill_server.bench.offline import write_result
from tokenmill_server.bench.values import positive

_MODULE = "tokenmill_engine.bench_scheduler"
_ROWS = (
    ("step_us_median", "Step, median (us):"),
    ("step_us_mean", "Step, mean (us):"),
    ("step_us_p99", "Step, P99 (us):"),
    ("prepare_us_mean", "of that worker preparation, mean (us):"),
    ("encode_us_mean", "Message encoding beside it, mean (us):"),
)


@dataclass(slots=True, frozen=True)
class SchedulerBench:
    """One run of the scheduler benchmark."""

    num_seqs: int
    num_steps: int
    num_clients: int
    data_parallel_size: int
    preparation: str
    log_stats: bool
    output_json: Path | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `tokenmill bench scheduler`."""
    add = parser.add_argument
    add("--num-seqs", type=positive, default=256, metavar="N", help="running requests")
    add("--num-steps", type=positive, default=2000, metavar="N")
    add("--num-clients", type=positive, default=1, metavar="N", help="API servers that the outputs are for")
    add("--data-parallel-size", type=positive, default=1, metavar="N", help="above 1: with block events")
    add("--preparation", choices=["gpu", "cpu", "none"], default="gpu", help="what a worker's host does for a step")
    add("--disable-log-stats", action="store_true", help="without metrics")
    add("--output-json", type=Path, metavar="FILE")


def bench_of(options: argparse.Namespace) -> SchedulerBench:
    """What the parsed flags ask for."""
    return SchedulerBench(
        num_seqs=options.num_seqs,
        num_steps=options.num_steps,
        num_clients=options.num_clients,
        data_parallel_size=options.data_parallel_size,
        preparation=options.preparation,
        log_stats=not options.disable_log_stats,
        output_json=options.output_json,
    )


def run(bench: SchedulerBench) -> int:
    """Run, print the times, write the result file if asked. Returns the exit code.

    Raises:
        StartupError: the engine's process failed; it has said why.
        ConfigError: the result file cannot be written.
    """
    command = [sys.executable, "-m", _MODULE]
    command += ["--num-seqs", str(bench.num_seqs), "--num-steps", str(bench.num_steps)]
    command += ["--num-clients", str(bench.num_clients), "--data-parallel-size", str(bench.data_parallel_size)]
    command += ["--preparation", bench.preparation]
    command += [] if bench.log_stats else ["--disable-log-stats"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise StartupError(f"the scheduler benchmark ended with status {done.returncode}")
    result = json.loads(done.stdout)
    sys.stdout.write(f"{'Running requests:':<42}{bench.num_seqs:>10}\n")
    for key, title in _ROWS:
        sys.stdout.write(f"{title:<42}{result[key]:>10.1f}\n")
    if bench.output_json is not None:
        write_result(bench.output_json, {"num_seqs": bench.num_seqs, "preparation": bench.preparation} | result)
    return 0
