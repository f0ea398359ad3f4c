"""What a schema costs, and what log-probabilities do: `python -m benchmarks.structured --model default`, from the root.

Starts a server and sends it the same load in turn, round after round: requests that are free, those whose output
follows a JSON schema, a list of records most of which is names, and those with the five likeliest tokens of each
position. All have as many tokens out, for the schemas have a text or a list that cannot end before. Prints JSON:
figures by kind of request, medians over the rounds, and by what free requests of the same round gave, which hardly
depends on the machine or on who else uses it. Needs no network; for a GPU give a folder with `config.json` and a
tokenizer, and `--flags "--load-format dummy"`.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.preemption import read_model
from tokenmill_engine.config.model_files import embedded_model_path
from tokenmill_engine.errors import TokenmillError
from tokenmill_server.bench.compare_plan import Load
from tokenmill_server.bench.compare_process import LoadError, Log, Program
from tokenmill_server.bench.compare_sides import Deadline, Figures, Model, RunningServer, free_port, started_server

_CHARS_PER_TOKEN = 64
"""More than tokens have on average, so that the text of the schema outlasts the request."""
_FREE = "free"
_KEYS = ("output_throughput", "median_itl_ms", "p99_itl_ms", "median_ttft_ms", "server_cpu_s")
Rounds = Mapping[str, Sequence[Figures]]


def fields_by_kind(output_len: int) -> dict[str, dict[str, Any]]:
    """What requests of each kind ask for beside tokens."""
    schema = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["story", "poem", "letter"]},
            "year": {"type": "integer", "minimum": 1000, "maximum": 2999},
            "text": {"type": "string", "minLength": _CHARS_PER_TOKEN * output_len},
        },
        "required": ["kind", "year", "text"],
        "additionalProperties": False,
    }
    records = {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "identifier": {"type": "integer", "minimum": 0, "maximum": 99},
                "is_available": {"type": "boolean"},
                "customer_category": {"enum": ["residential", "commercial", "industrial"]},
            },
            "required": ["identifier", "is_available", "customer_category"],
            "additionalProperties": False,
        },
        "minItems": output_len,
    }
    return {
        _FREE: {},
        "json_schema": {"structured_outputs": {"json": schema}},
        "json_records": {"structured_outputs": {"json": records, "disable_any_whitespace": True}},
        "logprobs": {"logprobs": 5},
    }


def measure(model: Model, flags: Sequence[str], load: Load, num_rounds: int, limit_s: float) -> Rounds:
    """Rounds of each kind on one server; later ones are left out if they would not fit into `limit_s`.

    Raises: SideError, also if some request came to fewer tokens than it should.
    """
    port, deadline = free_port(), Deadline(limit_s, step_share=1.0)
    command = [sys.executable, "-m", "tokenmill", "serve", str(model.path), "--served-model-name", "m", *flags]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    prompts = ["--prompt-format", "ids", "--vocab-size", str(model.vocab_size), "--tokenizer", str(model.path)]
    loads = {
        kind: RunningServer(port, model, "m", deadline, [*prompts, "--extra-body", json.dumps(fields)])
        for kind, fields in fields_by_kind(load.output_len).items()
    }
    rounds: dict[str, list[Figures]] = {kind: [] for kind in loads}
    with (
        tempfile.TemporaryDirectory(prefix="tokenmill-structured-") as folder,
        started_server(Program(command, os.environ), Log(Path(folder) / "log"), loads[_FREE]),
    ):
        longest_s = 0.0
        for number in range(num_rounds):
            if longest_s > deadline.left_s():
                break
            began_s = deadline.left_s()
            for index, (kind, server) in enumerate(loads.items()):
                before_s = _cpu_s()
                figures = server.measure(load, seed=1 + number * len(loads) + index)
                if figures["total_output_tokens"] != load.num_prompts * load.output_len:
                    raise LoadError(f"{kind}: only {figures['total_output_tokens']} tokens came")
                rounds[kind].append({**figures, "server_cpu_s": _cpu_s() - before_s})
            longest_s = max(longest_s, began_s - deadline.left_s())
    return rounds


def _cpu_s() -> float:
    """Processor time of the server so far: the load generator has ended, and all else that runs below us is the
    server's."""
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in times)


def summary(rounds: Rounds) -> dict[str, Any]:
    """Medians by kind, and ratios to free requests: medians of those of each round."""
    figures = {
        kind: {key: statistics.median(each[key] for each in runs) for key in _KEYS} for kind, runs in rounds.items()
    }
    ratios = {
        kind: {
            key: statistics.median(each[key] / free[key] for each, free in zip(runs, rounds[_FREE], strict=True))
            for key in _KEYS
        }
        for kind, runs in rounds.items()
        if kind != _FREE
    }
    return {"figures": figures, "by_free": ratios}


def main() -> int:
    """Measures and prints; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.structured", description=__doc__)
    parser.add_argument("--model", default="default", help="folder or .gguf; default: the embedded model")
    parser.add_argument("--flags", default="", help="of the server, in one string")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-prompts", type=int, default=96)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--time-limit", type=float, default=570.0, help="seconds for all of it")
    args = parser.parse_args()
    name = f"{args.concurrency} clients {args.input_len}/{args.output_len}"
    load = Load(name, "serve", args.num_prompts, args.input_len, args.output_len, args.concurrency)
    try:
        model = read_model(embedded_model_path() if args.model == "default" else Path(args.model))
        rounds = measure(model, shlex.split(args.flags), load, args.rounds, args.time_limit)
    except TokenmillError as error:
        sys.stderr.write(f"{parser.prog}: error: {error}\n")
        return 1
    told = {"load": name, "num_prompts": args.num_prompts, "rounds": len(rounds[_FREE]), "flags": args.flags}
    sys.stdout.write(json.dumps({**told, **summary(rounds)}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
