"""What images cost, and what remembering them saves: `python -m benchmarks.media [PART ...]`, from the root.

conversation  ten turns of a chat with four images, with and without caches: images prepared, bytes to the engine core
scale         one image in each request, by 1, 2 and 4 API servers: requests per second
ttft          seconds to the first token for images that are new, and for ones that are known
delay         what others notice while images of 20 megapixels are decoded: time between tokens, and an empty request

Real servers and a real client; the default is a tiny model with random weights on the CPU, so that images cost more
than the model. On a GPU: `--model LVL7B --args "--load-format dummy"`. Where API servers are measured, images are made
so few tokens that the engine has next to nothing to do. Each part prints a table, and with `--json` a line of JSON.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop

from tokenmill_engine.config.device import usable_cpus
from tokenmill_engine.config.model_files import resolve_model
from tokenmill_engine.errors import TokenmillError
from tokenmill_server.bench.compare_plan import Load
from tokenmill_server.bench.compare_process import Log, Program
from tokenmill_server.bench.compare_sides import Deadline, Model, RunningServer, free_port, started_server
from tokenmill_server.bench.http_client import HttpClient
from tokenmill_server.bench.metrics import RequestRecord
from tokenmill_server.bench.random_images import make_image

Figures = dict[str, Any]

_ENDPOINT = "/v1/chat/completions"
_ON_CPU = "--device cpu --dtype float32 --load-format dummy --kv-cache-memory-bytes 256M"
_LIMIT_S = 570.0
_NO_CACHE = ("--mm-processor-cache-gb", "0")
_FEW_TOKENS = ("--mm-processor-kwargs", '{"max_pixels": 50176}')
"""64 tokens for an image, whatever its size."""
_ASK_EVERY_S = 0.005
_NUM_STREAMS = 4
_NUM_LARGE = 2


@dataclass(slots=True, frozen=True)
class Setting:
    """What all parts share."""

    model: Model
    flags: tuple[str, ...]
    scale: float = 1.0
    """Of numbers of requests and turns, to try this out."""

    def count(self, number: int) -> int:
        return max(2, round(number * self.scale))


class Served:
    """A running server, and what it counts."""

    def __init__(self, port: int, server: RunningServer) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.server = server

    def counts(self) -> Mapping[str, float]:
        """Every counter of ours, summed over processes and engine cores."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as reply:
            page = reply.read().decode()
        sums: dict[str, float] = {}
        for name, value in re.findall(r"^tokenmill:(\w+)\{.*\} (\S+)$", page, re.MULTILINE):
            sums[name] = sums.get(name, 0.0) + float(value)
        return sums


@contextlib.contextmanager
def served(setting: Setting, *flags: str) -> Iterator[Served]:
    """A server of the model, ended with the block. Raises SideError."""
    port = free_port()
    command = [sys.executable, "-m", "tokenmill", "serve", str(setting.model.path), "--served-model-name", "m"]
    command += [*setting.flags, *flags, "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryDirectory(prefix="tokenmill-media-") as folder:
        options = ["--tokenizer", str(setting.model.path)]
        server = RunningServer(port, setting.model, "m", Deadline(_LIMIT_S, step_share=1.0), options)
        with started_server(Program(command, os.environ), Log(Path(folder) / "log"), server):
            yield Served(port, server)


# --- requests -----------------------------------------------------------------------------------------------------


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def picture(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def chat(messages: Sequence[Mapping[str, Any]], max_tokens: int) -> bytes:
    body = {"model": "m", "messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    # Random weights choose hundreds of tokens in a row that have no text: chunks of these come as well.
    options |= {"return_token_ids": True}
    return msgspec.json.encode(body | options)


def user(*parts: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": parts}


async def ask(client: HttpClient, body: bytes) -> RequestRecord:
    """Raises RuntimeError unless it was answered."""
    record = RequestRecord(0, 0)
    (await client.stream(_ENDPOINT, body, record)).close()
    if record.error is not None:
        raise RuntimeError(record.error)
    return record


def with_client(url: str, work: Callable[[HttpClient], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        client = HttpClient(url, {})
        try:
            return await work(client)
        finally:
            client.close()

    return uvloop.run(run())


def spread(what: str, values_s: Sequence[float]) -> dict[str, float]:
    """Milliseconds, by column of a table."""
    values = np.asarray(values_s) * 1e3
    figures = {"p50": np.median(values), "p99": np.percentile(values, 99), "max": values.max()}
    return {f"{what} {key} ms": float(value) for key, value in figures.items()}


# --- parts --------------------------------------------------------------------------------------------------------


def conversation(setting: Setting) -> list[Figures]:
    """A row for each turn. Every turn sends the whole conversation again, images included."""
    images = [picture(make_image((640, 480), number).url) for number in range(4)]
    turns: dict[str, list[Figures]] = {}
    for name, flags in (("with caches", ()), ("without", _NO_CACHE)):
        with served(setting, *flags) as server:
            turns[name] = _turns(server, images, setting.count(10), has_cache=not flags)
    return [
        {"turn": number + 1} | {f"{name}, {key}": value for name in turns for key, value in turns[name][number].items()}
        for number in range(len(turns["without"]))
    ]


def _turns(server: Served, images: Sequence[Mapping[str, Any]], count: int, has_cache: bool) -> list[Figures]:
    messages: list[Mapping[str, Any]] = [user(text("Compare these."), *images)]
    rows: list[Figures] = []
    for number in range(count):
        before = server.counts()
        record = with_client(server.url, partial(ask, body=chat(messages, 16)))
        after = server.counts()
        gained = {name: after[name] - before.get(name, 0.0) for name in after}
        prepared = gained["mm_cache_queries_total"] - gained["mm_cache_hits_total"] if has_cache else len(images)
        rows.append(
            {
                "prepared": round(prepared),
                "bytes to engine": round(gained["engine_message_bytes_total"]),
                "TTFT ms": record.ttft_s * 1e3,
            }
        )
        messages += [{"role": "assistant", "content": record.text}, user(text(f"And what of number {number}?"))]
    return rows


def scale(setting: Setting) -> list[Figures]:
    """A row for each number of API servers."""
    load = Load("images", "serve", setting.count(96), 8, 1, 32, image_sizes="2048x2048", warms_up=False)
    rows: list[Figures] = []
    for num_servers in (1, 2, 4):
        with served(setting, *_FEW_TOKENS, "--api-server-count", str(num_servers)) as server:
            server.server.measure(load, 100 + num_servers)  # the first requests of a process load and compile things
            figures = server.server.measure(load, num_servers)
        rate = figures["request_throughput"]
        first = rows[0]["requests/s"] if rows else rate
        rows.append({"API servers": num_servers, "requests/s": rate, "by one": rate / first})
    return rows


def ttft(setting: Setting) -> list[Figures]:
    """A row for new images and one for known ones: the same again, behind other text, so that no block is cached."""
    urls = [make_image((1536, 1024), number).url for number in range(setting.count(16))]

    async def work(client: HttpClient) -> dict[str, list[float]]:
        await ask(client, chat([user(text("Warm."), picture(make_image((1536, 1024), 10**6).url))], 1))
        seconds: dict[str, list[float]] = {"new": [], "known": []}
        for number, url in enumerate(urls):
            for name in seconds:
                body = chat([user(text(f"{number} {name}: what is this?"), picture(url))], 1)
                seconds[name].append((await ask(client, body)).ttft_s)
        return seconds

    with served(setting) as server:
        seconds = with_client(server.url, work)
        counts = server.counts()
    assert counts["mm_cache_hits_total"] == len(urls), "known images were looked up and found"
    rows = [{"images": name} | spread("TTFT", values_s) for name, values_s in seconds.items()]
    first = rows[0]["TTFT p50 ms"]
    return [row | {"p50 by new": row["TTFT p50 ms"] / first} for row in rows]


def delay(setting: Setting) -> list[Figures]:
    """A row for a quiet server, and one for while it decodes large images for others, two at a time. `streams lasted`
    is below 1 if the streams ended before the last image: what came then is seen by /health alone."""
    bodies = [
        chat([user(text("Small."), picture(make_image((5472, 3648), number).url))], 1)
        for number in range(setting.count(12))
    ]
    num_tokens = setting.count(12_000)
    at_once = asyncio.Semaphore(_NUM_LARGE)

    async def ask_for_large(client: HttpClient, body: bytes) -> None:
        async with at_once:
            await ask(client, body)

    async def work(client: HttpClient) -> dict[str, Figures]:
        await ask(client, bodies[0])
        seen: dict[str, Figures] = {}
        for name in ("quiet", "decoding"):
            chats = [chat([user(text(f"{name} {number}"))], num_tokens) for number in range(_NUM_STREAMS)]
            streams = asyncio.gather(*(ask(client, body) for body in chats))
            done = asyncio.Event()
            probe = asyncio.ensure_future(_ask_for_health(client, done))
            began_s = time.perf_counter()
            await (
                streams if name == "quiet" else asyncio.gather(*(ask_for_large(client, body) for body in bodies[1:]))
            )
            ended_s = time.perf_counter()
            done.set()
            records = await streams
            gaps_s = [
                later - earlier
                for record in records
                for earlier, later in pairwise(sorted(set(record.token_times_s)))
                if later >= began_s and earlier <= ended_s
            ]
            last_s = min(record.token_times_s[-1] for record in records)
            lasted = min(1.0, (last_s - began_s) / (ended_s - began_s))
            seen[name] = {"streams lasted": lasted} | spread("ITL", gaps_s) | spread("/health", await probe)
        return seen

    with served(setting, *_FEW_TOKENS) as server:
        seen = with_client(server.url, work)
    return [{"server": name} | figures for name, figures in seen.items()]


async def _ask_for_health(client: HttpClient, done: asyncio.Event) -> list[float]:
    """How long the event loop took to answer, again and again."""
    seconds: list[float] = []
    while not done.is_set():
        began_s = time.perf_counter()
        await client.get("/health")
        seconds.append(time.perf_counter() - began_s)
        await asyncio.sleep(_ASK_EVERY_S)
    return seconds


PARTS: Mapping[str, Callable[[Setting], list[Figures]]] = {
    "conversation": conversation,
    "scale": scale,
    "ttft": ttft,
    "delay": delay,
}


# --- output -------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Figures]) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _tiny_model(folder: Path) -> Path:
    """Not imported: scripts of this folder are no package to each other."""
    subprocess.run(
        [sys.executable, "-m", "benchmarks.media_shapes", "tiny", str(folder)], check=True, stdout=subprocess.DEVNULL
    )
    return folder


def main() -> int:
    """Measures and prints; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.media", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--model", type=Path, help="folder of a model that looks at images; default: a tiny one")
    parser.add_argument("--args", type=shlex.split, default=None, help=f"flags of the server; default: {_ON_CPU}")
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of requests and turns")
    parser.add_argument("--json", action="store_true", help="also a line of JSON for each part")
    args = parser.parse_args()
    unknown = set(args.parts) - PARTS.keys()
    if unknown:
        parser.error(f"there is no part {unknown.pop()}")
    with tempfile.TemporaryDirectory(prefix="tokenmill-media-") as folder:
        path = args.model or _tiny_model(Path(folder) / "model")
        try:
            architecture = resolve_model(str(path)).architecture
            model = Model(path.resolve(), architecture.vocab_size, architecture.max_position_embeddings)
            setting = Setting(model, tuple(shlex.split(_ON_CPU) if args.args is None else args.args), args.scale)
            for name in args.parts or PARTS:
                rows = PARTS[name](setting)
                print(f"\n{name}, {usable_cpus()} cores\n\n{table(rows)}", flush=True)  # noqa: T201 - the result
                if args.json:
                    print(json.dumps({"part": name, "cores": usable_cpus(), "rows": rows}), flush=True)  # noqa: T201
        except TokenmillError as error:
            sys.stderr.write(f"{parser.prog}: error: {error}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
