"""Starts a real API server process in front of echo engines, as the launcher would."""

import dataclasses
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.echo_engine import EchoEngine
from tests.support.server import PATIENCE_S
from tokenmill_engine.config.engine import EngineConfig, ModelConfig, ObservabilityConfig
from tokenmill_engine.config.model_files import resolve_model
from tokenmill_engine.ipc.child import ChildProcess, spawn_child
from tokenmill_engine.ipc.control import EnginesReady, FromApiServer, Listening, Serving
from tokenmill_server.config import ServerConfig
from tokenmill_server.control import ApiServerStart

MODEL_NAME = "smol"


def engine_config(**model_changes: Any) -> EngineConfig:
    """Configuration of the embedded model."""
    files = resolve_model(None)
    model = ModelConfig(
        name=files.name,
        path=files.path,
        tokenizer_path=files.tokenizer_path,
        architecture=files.architecture,
        load_format="gguf",
        dtype="float32",
        seed=0,
        max_model_len=8192,
        max_model_len_explicit=False,
        eos_token_ids=files.eos_token_ids,
    )
    return EngineConfig(
        model=dataclasses.replace(model, **model_changes), observability=ObservabilityConfig(model_name=MODEL_NAME)
    )


@dataclass
class Server:
    """API servers on one port, and the engines behind them."""

    port: int
    run_dir: str
    engines: list[EchoEngine]
    children: list[ChildProcess[FromApiServer]]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, verify=False, **options)

    def announce_engines(self) -> None:
        """Makes the servers ready; returns when they are."""
        for child in self.children:
            child.channel.send(EnginesReady([engine.ready() for engine in self.engines]))
        for child in self.children:
            assert isinstance(child.channel.receive(), Serving)


@contextmanager
def run_server(
    num_engines: int = 1,
    ready: bool = True,
    engine: EngineConfig | None = None,
    engine_options: dict[str, Any] | None = None,
    module: str = "tokenmill_server.api_process",
    **server_options: Any,
) -> Iterator[Server]:
    """A server with `server_options` as fields of `ServerConfig`."""
    config = ServerConfig(**{"served_model_names": (MODEL_NAME, "other/name"), **server_options})
    engine = dataclasses.replace(engine or engine_config(), data_parallel_size=num_engines)
    with (
        tempfile.TemporaryDirectory(prefix="tokenmill-test-") as run_dir,
        socket.create_server(("127.0.0.1", 0), backlog=1024) as listener,
    ):
        metrics_dir = Path(run_dir) / "metrics"
        metrics_dir.mkdir()
        engines = [EchoEngine(run_dir, index, **(engine_options or {})).start() for index in range(num_engines)]
        children: list[ChildProcess[FromApiServer]] = []
        server = Server(listener.getsockname()[1], run_dir, engines, children)
        try:
            for client in range(config.api_server_count):
                child: ChildProcess[FromApiServer] = spawn_child(
                    module,
                    FromApiServer,
                    pass_fds=(listener.fileno(),),
                    env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(metrics_dir)},
                )
                children.append(child)
                child.channel.send(ApiServerStart(client, 0, run_dir, listener.fileno(), config, engine))
            for child in children:
                assert isinstance(child.channel.receive(), Listening)
            if ready:
                server.announce_engines()
            yield server
        finally:
            for child in children:
                child.process.kill()
                child.process.wait(PATIENCE_S)
                child.channel.close()
            for one in engines:
                one.stop()
