"""What an API server costs beside a peer's: CPU time per streamed token and per request.

    python -m benchmarks.frontend_peer --model FOLDER --peer-command "vllm serve {model} --port {port} ..."

Starts Tokenmill and a peer in turn, with the same model, and sends both the same load: streamed chats at several
concurrencies, then chats that are answered with one token, short ones and ones of 1000 tokens. Every prompt is a new
one, so no cache has it. Reported is what the kernel charged to the process that speaks HTTP, in user and system
mode, all of its threads: ours is the API server without launcher and engine core, the peer's is the command that was
started without its children, or the descendants whose command line matches `--peer-process`. An engine's own time is in
neither; how long its steps take is, as far as a server does something for each step.
"""

import argparse
import asyncio
import json
import os
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import uvloop
from tokenizers import Tokenizer

from benchmarks.frontend import cpu_s
from tokenmill_engine.config.model_files import embedded_model_path, resolve_model
from tokenmill_engine.errors import ConfigError
from tokenmill_server.bench.compare_process import Log, Program, SideError, running_process
from tokenmill_server.bench.compare_sides import Deadline, Model, RunningServer, free_port
from tokenmill_server.bench.http_client import HttpClient
from tokenmill_server.bench.tokenizer import load_tokenizer

OUR_COMMAND = f"{shlex.quote(sys.executable)} -m tokenmill serve {{model}} --port {{port}} --served-model-name {{name}}"
OUR_PROCESS = "tokenmill: api server"
_NAME = "measured"
_START_LIMIT_S = 300.0
_IDLE_S = 3.0
_WARM_UP_SEED = 2**31
_WORDS_PER_SENTENCE = 12
_RARE_EVERY = 8
"""One word in so many is put together from two, which no vocabulary has whole."""


@dataclass(slots=True, frozen=True)
class Load:
    """`concurrency` clients send `per_client` chats each, one after the other."""

    name: str
    unit: str
    """What the CPU time is divided by: `token` that was generated, or `request`."""
    concurrency: int
    per_client: int
    input_tokens: int
    output_tokens: int
    streams: bool


@dataclass(slots=True, frozen=True)
class Side:
    """A server to measure."""

    name: str
    command: str
    environment: Mapping[str, str]
    process: str | None
    """Which descendants of the command speak HTTP, as a pattern for their command lines; None: the command itself."""


def loads_of(concurrencies: Sequence[int], per_client: int, output_tokens: int) -> list[Load]:
    """Streams of each concurrency, and requests for a single token. One client alone sends twice as many."""
    streams = [
        Load(f"stream, {count} at once", "token", count, per_client * (2 if count == 1 else 1), 64, output_tokens, True)
        for count in concurrencies
    ]
    return [
        *streams,
        Load("request of 32 tokens", "request", 4, 16 * per_client, 32, 1, False),
        Load("request of 1000 tokens", "request", 4, 6 * per_client, 1000, 1, False),
    ]


class TextMaker:
    """Prompts of ordinary words, sentences and paragraphs. Equal seeds give equal texts."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rng = np.random.default_rng(seed)
        spelled = (token[1:] for token in tokenizer.get_vocab() if token[:1] in ("\u0120", "\u2581"))
        self._words = sorted(word for word in spelled if len(word) > 2 and word.isascii() and word.isalpha())

    def text(self, num_tokens: int) -> str:
        """A text of so many tokens."""
        drawn = iter(self._rng.integers(len(self._words), size=3 * num_tokens).tolist())
        pieces = []
        for position in range(num_tokens):
            word = self._words[next(drawn)]
            if position % _RARE_EVERY == 0:
                word += self._words[next(drawn)]
            place = position % _WORDS_PER_SENTENCE
            ends_sentence, ends_paragraph = place == _WORDS_PER_SENTENCE - 1, position % 60 == 59
            pieces.append((word.capitalize() if place == 0 else word) + ("." if ends_sentence else ""))
            pieces.append("\n\n" if ends_paragraph else " ")
        text = "".join(pieces)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return text[: encoding.offsets[num_tokens - 1][1]]


def http_processes(root: psutil.Process, pattern: str | None) -> list[int]:
    """The processes to measure. Raises SideError if there are none."""
    if pattern is None:
        return [root.pid]
    found = [each.pid for each in root.children(recursive=True) if re.search(pattern, " ".join(each.cmdline()))]
    if not found:
        raise SideError(f"no descendant of the server has a command line with {pattern!r}")
    return found


class Measurement:
    """One server that runs."""

    def __init__(self, port: int, pids: Sequence[int]) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._pids = pids

    def run(self, load: Load, maker: TextMaker) -> dict[str, float]:
        """Microseconds of CPU time per unit, and the tokens of the median prompt. Raises SideError."""
        bodies = [_body(load, maker) for _ in range(load.concurrency * load.per_client)]
        before_s, started_s = cpu_s(self._pids), time.perf_counter()
        usages = uvloop.run(self._send(load, bodies))
        spent_s, elapsed_s = cpu_s(self._pids) - before_s, time.perf_counter() - started_s
        num_tokens = sum(usage["completion_tokens"] for usage in usages)
        if num_tokens != len(bodies) * load.output_tokens:
            raise SideError(f"{load.name}: {num_tokens} tokens for {len(bodies)} requests of {load.output_tokens}")
        return {
            "cpu_us": spent_s * 1e6 / (num_tokens if load.unit == "token" else len(bodies)),
            "cpu_share": spent_s / elapsed_s,
            "prompt_tokens": statistics.median(usage["prompt_tokens"] for usage in usages),
        }

    def idle(self) -> dict[str, float]:
        """Microseconds of CPU time in a second in which nobody asks for anything."""
        before_s = cpu_s(self._pids)
        time.sleep(_IDLE_S)
        return {"cpu_us": (cpu_s(self._pids) - before_s) / _IDLE_S * 1e6}

    async def _send(self, load: Load, bodies: Sequence[bytes]) -> list[dict[str, int]]:
        client = HttpClient(self._url, {})
        await client.open(load.concurrency)
        left = iter(bodies)
        usages: list[dict[str, int]] = []

        async def send_some() -> None:
            for body in left:
                status, answer = await client.post("/v1/chat/completions", body)
                if status != 200:
                    raise SideError(f"{load.name}: HTTP {status}: {answer[:500].decode(errors='replace')}")
                usages.append(_usage(answer, load.streams))

        await asyncio.gather(*(send_some() for _ in range(load.concurrency)))
        client.close()
        return usages


def _body(load: Load, maker: TextMaker) -> bytes:
    body: dict[str, Any] = {
        "model": _NAME,
        "messages": [{"role": "user", "content": maker.text(load.input_tokens)}],
        "max_tokens": load.output_tokens,
        "temperature": 0.7,
        "ignore_eos": True,
    }
    if load.streams:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(body).encode()


def _usage(answer: bytes, is_stream: bool) -> dict[str, int]:
    if is_stream:
        *_, last, done, end = answer.split(b"\n\n")
        if (done, end) != (b"data: [DONE]", b""):
            raise SideError(f"a stream ended with {answer[-200:]!r}")
        answer = last.removeprefix(b"data: ")
    usage: dict[str, int] = json.loads(answer)["usage"]
    return usage


@contextmanager
def _running(side: Side, model: Path, log: Log) -> Iterator[Measurement]:
    """Raises SideError."""
    files = resolve_model(str(model))
    port = free_port()
    command = [word.format(model=model, port=port, name=_NAME) for word in shlex.split(side.command)]
    known = Model(model, files.architecture.vocab_size, files.max_position)
    server = RunningServer(port, known, _NAME, Deadline(_START_LIMIT_S), ())
    with running_process(Program(command, {**os.environ, **side.environment}), log) as process:
        server.wait_for_answer(process, time.monotonic(), log)
        measurement = Measurement(port, http_processes(psutil.Process(process.pid), side.process))
        for load in loads_of((8,), 1, 32):
            measurement.run(load, TextMaker(load_tokenizer(str(model)), _WARM_UP_SEED))
        yield measurement


def measure_round(side: Side, model: Path, loads: Sequence[Load], seed: int, log: Log) -> dict[str, dict[str, float]]:
    """Figures of every load, of a server started for them. Raises SideError."""
    maker = TextMaker(load_tokenizer(str(model)), seed)
    with _running(side, model, log) as measurement:
        figures = {"idle second": measurement.idle()}
        for load in loads:
            figures[load.name] = measurement.run(load, maker)
            sys.stderr.write(f"{side.name}: {load.name}: {figures[load.name]['cpu_us']:.1f} us per {load.unit}\n")
    return figures


def summary(rounds: Mapping[str, Sequence[Mapping[str, Mapping[str, float]]]]) -> list[dict[str, Any]]:
    """One row for each load: median, extremes and prompt tokens of each side, and the ratio of the medians."""
    rows: list[dict[str, Any]] = []
    for load in next(iter(rounds.values()))[0]:
        row: dict[str, Any] = {"load": load}
        for side, figures in rounds.items():
            values = [each[load]["cpu_us"] for each in figures]
            row[side] = {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
            row[side] |= {"prompt_tokens": figures[0][load].get("prompt_tokens")}
        ours, *peers = (row[side]["median"] for side in rounds)
        row |= {"ratio": ours / peers[0]} if peers else {}
        rows.append(row)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows in Markdown."""
    sides = [name for name in rows[0] if name not in ("load", "ratio")]
    lines = [f"| us of CPU time for a | {' | '.join(sides)} | ratio |", "|---" * (len(sides) + 2) + "|"]
    for row in rows:
        figures = [row[side] for side in sides]
        cells = [f"{each['median']:.1f} ({each['lowest']:.1f} to {each['highest']:.1f})" for each in figures]
        ratio = f"{row['ratio']:.3f}" if "ratio" in row else ""
        lines.append(f"| {row['load']} | {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Raises SystemExit."""
    options = _options()
    environment = dict(pair.partition("=")[::2] for pair in options.peer_env)
    sides = [Side("Tokenmill", f"{OUR_COMMAND} {options.args}", {}, OUR_PROCESS)]
    if options.peer_command:
        sides.append(Side(options.peer, options.peer_command, environment, options.peer_process))
    loads = loads_of(options.concurrency, options.per_client, options.output_tokens)
    rounds: dict[str, list[dict[str, dict[str, float]]]] = {side.name: [] for side in sides}
    with tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as folder:
        try:
            for number in range(options.rounds):
                for side in sides:
                    log = Log(Path(folder) / f"{side.name}.log")
                    rounds[side.name].append(measure_round(side, options.model, loads, options.seed + number, log))
                if options.output is not None:
                    _save(options.output, rounds)
        except (SideError, ConfigError) as error:
            raise SystemExit(str(error)) from None
    sys.stdout.write(table(summary(rounds)))


def _save(path: Path, rounds: Mapping[str, Sequence[Mapping[str, Mapping[str, float]]]]) -> None:
    """Every figure of the rounds that are over."""
    result = {
        "date": datetime.now().isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks.frontend_peer", *sys.argv[1:]]),
        "load_average": os.getloadavg(),
        "rows": summary(rounds),
        "rounds": rounds,
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, default=embedded_model_path(), help="folder or .gguf file that both serve"
    )
    parser.add_argument("--args", default="", help="flags for our server, in one word")
    parser.add_argument("--peer", default="peer", help="its name in the table")
    parser.add_argument("--peer-command", help="with {model}, {port} and {name}; default: measure us alone")
    parser.add_argument("--peer-process", metavar="PATTERN", help="descendants of the peer's command that speak HTTP")
    parser.add_argument("--peer-env", metavar="NAME=VALUE", nargs="*", default=[])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], help="of streams")
    parser.add_argument("--per-client", type=int, default=1, help="streams that a client sends, one after the other")
    parser.add_argument("--output-tokens", type=int, default=128, help="of a stream")
    parser.add_argument("--rounds", type=int, default=3, help="each with servers of its own; medians count")
    parser.add_argument("--seed", type=int, default=0, help="of the first round's prompts")
    parser.add_argument("--output", type=Path, help="a JSON file for every figure")
    return parser.parse_args()


if __name__ == "__main__":
    main()
