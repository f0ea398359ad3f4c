"""What the API server costs: CPU time per streamed token, with an engine and a client that cost it nothing.

    python benchmarks/frontend.py [--streams 32 256] [--prompts chat] [--input-tokens 256] [--output-tokens 64]

Starts a real API server process (embedded model's tokenizer) in front of a null engine, which speaks the real ZeroMQ
protocol and gives every open request one token per step at a fixed rate. A lean client in this process keeps the
given number of streams open: chats, or completions of token ids. Reported is the CPU time (user + system) that the
kernel charged to the API server between the first and the last request, divided by the tokens that arrived: HTTP
parsing, templates and tokenization of the prompts are part of it. Then all streams at once ask for a single token,
several times: what a request costs by itself, and how long after the burst the answers come.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import psutil
import uvloop
import zmq

from tokenmill_engine.config.engine import EngineConfig, ModelConfig, ObservabilityConfig
from tokenmill_engine.config.model_files import resolve_model
from tokenmill_engine.ipc.child import ChildProcess, spawn_child
from tokenmill_engine.ipc.control import EnginesReady, FromApiServer, Listening
from tokenmill_engine.ipc.ids import client_identity, client_of
from tokenmill_engine.ipc.sockets import bind_router, local_endpoints
from tokenmill_engine.messages import (
    AbortRequests,
    AddRequest,
    ClientMessage,
    EngineLoad,
    EngineReady,
    Finish,
    FinishReason,
    StepOutput,
)
from tokenmill_server.children import stop_children
from tokenmill_server.config import ServerConfig
from tokenmill_server.control import ApiServerStart

_MODEL_NAME = "smollm2"
_TOKENS = [504, 3575, 282, 4649, 314, 7042, 30, 198]
"""Common words: about four characters a token."""
_BURSTS = 5


def run_null_engine(run_dir: str, step_s: float) -> None:
    """One token for each open request every `step_s` seconds, until killed."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    endpoints = local_endpoints(run_dir, 0)
    requests = bind_router(context, endpoints.input)
    outputs = bind_router(context, endpoints.output)
    decoder = msgspec.msgpack.Decoder(ClientMessage)
    remaining: dict[int, int] = {}
    next_step = time.perf_counter()
    step = 0
    while True:
        wait_ms = max(0, int((next_step - time.perf_counter()) * 1000)) if remaining else 1000
        while requests.poll(wait_ms):
            message = decoder.decode(requests.recv_multipart()[1])
            if isinstance(message, AddRequest):
                remaining[message.request_id] = message.sampling.max_tokens or 1
            elif isinstance(message, AbortRequests):
                for request_id in message.request_ids:
                    remaining.pop(request_id, None)
            wait_ms = max(0, int((next_step - time.perf_counter()) * 1000))
        if not remaining or time.perf_counter() < next_step:
            continue
        next_step = max(next_step + step_s, time.perf_counter())
        step += 1
        _send_step(outputs, remaining, _TOKENS[step % len(_TOKENS)])


def _send_step(outputs: "zmq.Socket[bytes]", remaining: dict[int, int], token: int) -> None:
    by_client: dict[int, list[int]] = {}
    for request_id in remaining:
        by_client.setdefault(client_of(request_id), []).append(request_id)
    for client, request_ids in by_client.items():
        count = len(request_ids)
        finishes = []
        for index, request_id in enumerate(request_ids):
            remaining[request_id] -= 1
            if remaining[request_id] == 0:
                del remaining[request_id]
                finishes.append(Finish(index, FinishReason.LENGTH))
        message = StepOutput(
            engine=0,
            request_ids=struct.pack(f"<{count}q", *request_ids),
            num_tokens=struct.pack("<i", 1) * count,
            token_ids=struct.pack("<i", token) * count,
            load=EngineLoad(count, 0, 0.5),
            finishes=finishes,
        )
        outputs.send_multipart([client_identity(client), msgspec.msgpack.encode(message)])


class StreamClient(asyncio.Protocol):
    """Sends one chat request after another over one connection and counts events."""

    def __init__(self, request: bytes, num_requests: int, done: "asyncio.Future[None]") -> None:
        self._request = request
        self._left = num_requests
        self._done = done
        self._tail = b""
        self._sent_s = 0.0
        self.num_events = 0
        self.times_s: list[float] = []
        """From each request to its last event."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._next()

    def data_received(self, data: bytes) -> None:
        self.num_events += data.count(b"data: {")
        self._tail = (self._tail + data)[-16:]
        if self._tail.endswith(b"\r\n0\r\n\r\n"):
            self._tail = b""
            self.times_s.append(time.perf_counter() - self._sent_s)
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(exc or ConnectionError("the server closed the connection"))

    def _next(self) -> None:
        if self._left == 0:
            if not self._done.done():
                self._done.set_result(None)
            self._transport.close()
            return
        self._left -= 1
        self._sent_s = time.perf_counter()
        self._transport.write(self._request)


async def run_streams(port: int, num_streams: int, num_requests: int, request: bytes) -> tuple[int, list[float]]:
    """Every stream sends `num_requests` requests; returns the number of events that arrived and how long each answer
    took."""
    loop = asyncio.get_running_loop()
    clients = []
    done = []
    for _ in range(num_streams):
        finished: asyncio.Future[None] = loop.create_future()
        _, client = await loop.create_connection(
            partial(StreamClient, request, num_requests, finished), "127.0.0.1", port
        )
        clients.append(client)
        done.append(finished)
    await asyncio.gather(*done)
    times_s = [time_s for client in clients for time_s in client.times_s]
    return sum(client.num_events for client in clients), times_s


def make_request(prompts: str, input_tokens: int, output_tokens: int) -> bytes:
    """An HTTP request whose prompt has about `input_tokens` tokens."""
    body: dict[str, Any] = {"model": _MODEL_NAME, "max_tokens": output_tokens, "temperature": 0.7, "stream": True}
    if prompts == "chat":
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": " word" * max(1, input_tokens - 31)}]
    else:
        path = "/v1/completions"
        body["prompt"] = [1000 + 7 * position % 40000 for position in range(input_tokens)]
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer none\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def _engine_config() -> EngineConfig:
    files = resolve_model(None)
    model = ModelConfig(
        name=files.name,
        path=files.path,
        tokenizer_path=files.tokenizer_path,
        architecture=files.architecture,
        load_format="gguf",
        dtype="bfloat16",
        seed=0,
        max_model_len=files.max_position,
        max_model_len_explicit=False,
        eos_token_ids=files.eos_token_ids,
    )
    return EngineConfig(model=model, observability=ObservabilityConfig(model_name=_MODEL_NAME))


def cpu_s(pids: Sequence[int]) -> float:
    """CPU time of processes so far, all threads, user and system mode, exact to less than a microsecond."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)  # the kernel's number of a process's CPU clock


def measure(arguments: argparse.Namespace, num_streams: int) -> dict[str, Any]:
    """One run with fresh processes."""
    request = make_request(arguments.prompts, arguments.input_tokens, arguments.output_tokens)
    single = make_request(arguments.prompts, arguments.input_tokens, 1)
    with (
        tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as run_dir,
        socket.create_server(("127.0.0.1", 0), backlog=2048) as listener,
    ):
        (Path(run_dir) / "metrics").mkdir()
        command = [sys.executable, __file__, "--null-engine", run_dir, "--step-ms", str(arguments.step_ms)]
        engine = subprocess.Popen(command)
        child: ChildProcess[FromApiServer] = spawn_child(
            "tokenmill_server.api_process",
            FromApiServer,
            pass_fds=(listener.fileno(),),
            env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": f"{run_dir}/metrics"},
        )
        try:
            server = ServerConfig(served_model_names=(_MODEL_NAME,))
            child.channel.send(ApiServerStart(0, 0, run_dir, listener.fileno(), server, _engine_config()))
            if not isinstance(child.channel.receive(), Listening):
                raise RuntimeError("the API server did not start")
            ready = EngineReady(0, 0, local_endpoints(run_dir, 0), 8192, 1000, 16, 16000, "null")
            child.channel.send(EnginesReady([ready]))
            time.sleep(1.0)
            process = psutil.Process(child.process.pid)
            port = listener.getsockname()[1]
            uvloop.run(run_streams(port, num_streams, 1, request))  # warm
            result = _timed(process, port, num_streams, arguments.requests, request)
            return result | _burst(process, port, num_streams, single)
        finally:
            stop_children((child,))
            engine.kill()
            engine.wait()


def _timed(process: psutil.Process, port: int, num_streams: int, num_requests: int, request: bytes) -> dict[str, Any]:
    before, spent_s, started = process.cpu_times(), cpu_s([process.pid]), time.perf_counter()
    num_events, _ = uvloop.run(run_streams(port, num_streams, num_requests, request))
    spent_s, elapsed_s = cpu_s([process.pid]) - spent_s, time.perf_counter() - started
    after = process.cpu_times()
    num_tokens = num_events - num_streams * num_requests  # each answer has one more chunk: the role's or the usage's
    user_us = (after.user - before.user) / num_tokens * 1e6
    system_us = (after.system - before.system) / num_tokens * 1e6
    return {
        "streams": num_streams,
        "tokens": num_tokens,
        "tokens_per_s": round(num_tokens / elapsed_s),
        "cpu_us_per_token": round(spent_s / num_tokens * 1e6, 1),
        "user_us_per_token": round(user_us, 1),
        "system_us_per_token": round(system_us, 1),
        "cpu_share": round(spent_s / elapsed_s, 3),
        "rss_mb": round(process.memory_info().rss / 1e6, 1),
    }


def _burst(process: psutil.Process, port: int, num_streams: int, request: bytes) -> dict[str, Any]:
    """All streams ask at once for one token each: the cost of a request, and when the answers have come."""
    before_s = cpu_s([process.pid])
    bursts = [sorted(uvloop.run(run_streams(port, num_streams, 1, request))[1]) for _ in range(_BURSTS)]
    spent_s = cpu_s([process.pid]) - before_s
    return {
        "cpu_us_per_request": round(spent_s / (_BURSTS * num_streams) * 1e6, 1),
        "burst_p50_ms": round(statistics.median(burst[len(burst) // 2] for burst in bursts) * 1e3, 1),
        "burst_last_ms": round(statistics.median(burst[-1] for burst in bursts) * 1e3, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--prompts", choices=["chat", "ids"], default="chat", help="chats or completions of token ids")
    parser.add_argument("--input-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=10, help="per stream")
    parser.add_argument("--step-ms", type=float, default=20.0, help="time between two tokens of a stream")
    parser.add_argument("--repeat", type=int, default=1, help="report the median of so many runs")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--null-engine", metavar="RUN_DIR", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.null_engine:
        run_null_engine(arguments.null_engine, arguments.step_ms / 1000)
        return
    results = []
    for num_streams in arguments.streams:
        runs = [measure(arguments, num_streams) for _ in range(arguments.repeat)]
        middle = statistics.median_low([run["cpu_us_per_token"] for run in runs])
        results.append(next(run for run in runs if run["cpu_us_per_token"] == middle))
        print(json.dumps(results[-1]), flush=True)  # noqa: T201 - the result of a benchmark
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
