"""A real engine core process with a tiny random model, and a client that speaks its sockets."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import zmq

from tests.support.model_loading import model_config
from tests.support.tiny_models import cached_tiny_model
from tokenmill_engine.config.engine import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ObservabilityConfig,
    SchedulerConfig,
)
from tokenmill_engine.ipc.child import ChildProcess, spawn_child
from tokenmill_engine.ipc.control import EngineStart, FromEngine
from tokenmill_engine.ipc.frames import MessageEncoder, send_frames
from tokenmill_engine.ipc.ids import RequestIds, client_identity
from tokenmill_engine.ipc.signals import END_SIGNAL
from tokenmill_engine.ipc.sockets import connect_dealer, local_endpoints
from tokenmill_engine.messages import (
    AddRequest,
    BlockEvents,
    ClientMessage,
    EngineLoad,
    EngineMessage,
    EngineReady,
    Finish,
    Hello,
    LoadReport,
    SamplingParams,
)


def tiny_engine_config(
    max_model_len: int = 128, num_blocks: int = 64, scheduler: SchedulerConfig | None = None
) -> EngineConfig:
    """A Llama of three layers in float32 on the CPU; 16 tokens to a block."""
    return EngineConfig(
        model=model_config(cached_tiny_model("llama"), max_model_len=max_model_len),
        cache=CacheConfig(num_gpu_blocks_override=num_blocks),
        scheduler=scheduler or SchedulerConfig(),
        device=DeviceConfig(kind="cpu", num_threads=1),
        observability=ObservabilityConfig(model_name="tiny", stats_interval_s=0.5),
    )


@dataclass
class Answer:
    """What a request was told so far."""

    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None


class EngineTalker:
    """API server `client` as the engine sees it."""

    def __init__(self, run_dir: str, client: int, engine: int = 0) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        identity = client_identity(client)
        endpoints = local_endpoints(run_dir, engine)
        self._output = connect_dealer(self._context, endpoints.output, identity)
        self._input = connect_dealer(self._context, endpoints.input, identity)
        self._decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)
        self._ids = RequestIds(client)
        self.client = client
        self.answers: dict[int, Answer] = {}
        self.load: EngineLoad | None = None
        self.blocks: set[int] = set()
        """Short names of what the engine says its prefix cache holds."""
        self.num_messages = 0
        self.send(Hello(client))

    def send(self, message: ClientMessage) -> None:
        send_frames(self._input, MessageEncoder().encode(message))

    def send_raw(self, frame: bytes) -> None:
        self._input.send(frame)

    def add(self, prompt: list[int], sampling: SamplingParams) -> int:
        request_id = self._ids.next()
        self.answers[request_id] = Answer()
        packed = np.array(prompt, dtype="<i4").tobytes()
        self.send(AddRequest(request_id, f"client-{request_id}", packed, sampling, time.monotonic()))
        return request_id

    def poll(self, timeout_s: float = 0.1) -> bool:
        """Take one message in; False if none came."""
        if not self._output.poll(int(timeout_s * 1000)):
            return False
        message = self._decoder.decode(self._output.recv())
        self.num_messages += 1
        if isinstance(message, BlockEvents):
            known = set() if message.is_snapshot else self.blocks
            self.blocks = known - _names(message.removed) | _names(message.stored)
            return True
        self.load = message.load
        if isinstance(message, LoadReport):
            return True
        request_ids = np.frombuffer(message.request_ids, "<i8").tolist()
        counts = np.frombuffer(message.num_tokens, "<i4").tolist()
        tokens = np.frombuffer(message.token_ids, "<i4").tolist()
        for request_id, count in zip(request_ids, counts, strict=True):
            self.answers[request_id].tokens.extend(tokens[:count])
            tokens = tokens[count:]
        assert not tokens
        for finish in message.finishes:
            answer = self.answers[request_ids[finish.index]]
            assert answer.finish is None
            answer.finish = finish
        return True

    def wait_for_tokens(self, *request_ids: int, count: int = 1, timeout_s: float = 60.0) -> None:
        """Until each of these has got `count` tokens."""
        deadline = time.monotonic() + timeout_s
        while any(len(self.answers[request_id].tokens) < count for request_id in request_ids):
            assert time.monotonic() < deadline, "no tokens"
            self.poll()

    def finish(self, *request_ids: int, timeout_s: float = 60.0) -> list[Answer]:
        """Wait until all of these have ended."""
        answers = [self.answers[request_id] for request_id in request_ids]
        deadline = time.monotonic() + timeout_s
        while any(answer.finish is None for answer in answers):
            assert time.monotonic() < deadline, "no answer"
            self.poll()
        return answers

    def wait_for_load(self, load: EngineLoad, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self.load != load:
            assert time.monotonic() < deadline, f"load is {self.load}"
            self.poll()

    def close(self) -> None:
        self._context.destroy(linger=0)


def _names(packed: bytes) -> set[int]:
    return set(np.frombuffer(packed, "<u8").tolist())


@dataclass
class RunningEngine:
    """A started engine core."""

    child: ChildProcess[FromEngine]
    ready: EngineReady
    run_dir: str
    log: Path
    started_s: float
    """Seconds from the command to the message that it is ready."""

    @property
    def pid(self) -> int:
        return self.child.process.pid

    def stop(self) -> int:
        """Tells it to end, as a launcher does; returns the exit status."""
        os.kill(self.pid, END_SIGNAL)
        return self.child.process.wait(timeout=60)


@contextmanager
def running_engine(config: EngineConfig) -> Iterator[RunningEngine]:
    """An engine core process that is ready; killed on leaving if it still runs."""
    began = time.monotonic()
    with started_engine(config) as (child, run_dir, log):
        ready = child.channel.receive()
        assert isinstance(ready, EngineReady), ready
        yield RunningEngine(child, ready, run_dir, log, time.monotonic() - began)


@contextmanager
def started_engine(config: EngineConfig, **variables: str) -> Iterator[tuple[ChildProcess[FromEngine], str, Path]]:
    """An engine core process that was told what to do; its run directory and the file it logs to. `variables` are added
    to its environment."""
    run_dir = tempfile.mkdtemp(prefix="tm-test-", dir="/tmp")
    log = Path(run_dir) / "log"
    metrics = Path(run_dir) / "metrics"
    metrics.mkdir()
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(metrics), **variables}
    num_workers = config.parallel.world_size if config.parallel.executor == "mp" else 0
    began = time.monotonic()
    stderr = os.dup(2)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 2)
        try:
            child: ChildProcess[FromEngine] = spawn_child(
                "tokenmill_engine.process",
                FromEngine,
                args=["--run-dir", run_dir, "--workers", str(num_workers)],
                env=environment,
            )
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
    try:
        child.channel.send(EngineStart(0, 0, run_dir, local_endpoints(run_dir, 0), config, began))
        yield child, run_dir, log
    finally:
        if child.process.poll() is None:
            child.process.kill()
        child.process.wait()
        child.channel.close()
        shutil.rmtree(run_dir, ignore_errors=True)
