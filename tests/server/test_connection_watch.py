"""A connection to an engine core on another machine that breaks: answers may be lost, so they end; then all goes on."""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.api_server import Server, engine_config, run_server
from tests.support.far_engines import FarEngine, far_engines, far_way_to
from tests.support.server import PATIENCE_S, wait_for
from tests.support.tcp_proxy import TcpProxy
from tokenmill_engine.ipc.child import ChildProcess, spawn_child
from tokenmill_engine.ipc.control import EnginesReady, FromApiServer, Listening, Serving
from tokenmill_server.config import ServerConfig
from tokenmill_server.control import ApiServerStart

pytestmark = pytest.mark.slow

STREAM = {"model": "smol", "prompt": "one two three", "max_tokens": 5000, "stream": True, "ignore_eos": True}
SHORT = {"model": "smol", "prompt": "one two three", "max_tokens": 3, "ignore_eos": True}


@contextmanager
def far_server() -> Iterator[tuple[Server, list[TcpProxy]]]:
    """An API server whose engine is behind two proxies: of its input and of its output."""
    with (
        run_server(ready=False, engine_options={"over_tcp": True, "step_s": 0.01}) as server,
        far_way_to(server.engines[0]) as far,
    ):
        (child,) = server.children
        child.channel.send(EnginesReady([far.ready()]))
        assert isinstance(child.channel.receive(), Serving)
        yield server, far.proxies


@contextmanager
def replaced_server(run_dir: str, far: FarEngine) -> Iterator[tuple[httpx.Client, ChildProcess[FromApiServer]]]:
    """An API server that is told of a running engine before it listens, as one that replaces another."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        child: ChildProcess[FromApiServer] = spawn_child(
            "tokenmill_server.api_process",
            FromApiServer,
            pass_fds=(listener.fileno(),),
            env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": run_dir},
        )
        try:
            config = ServerConfig(served_model_names=("smol",))
            child.channel.send(ApiServerStart(0, 1, run_dir, listener.fileno(), config, engine_config()))
            child.channel.send(EnginesReady([far.ready()]))
            assert child.channel.receive() == Listening()
            with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=PATIENCE_S) as client:
                yield client, child
        finally:
            child.process.kill()
            child.process.wait(PATIENCE_S)
            child.channel.close()


def wait_for_answers(client: httpx.Client) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while (answer := client.post("/v1/completions", json=SHORT)).status_code != 200:
        assert answer.status_code in (500, 503)
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.05)
    assert answer.json()["usage"]["completion_tokens"] == 3


def test_streams_end_with_an_error_and_the_engine_is_used_again() -> None:
    with far_server() as (server, proxies), server.client() as client:
        for proxy in proxies:
            with client.stream("POST", "/v1/completions", json=STREAM) as answer:
                lines = (line for line in answer.iter_lines() if line)
                with closing(lines):
                    for _ in range(3):
                        assert "choices" in json.loads(next(lines).removeprefix("data: "))
                    proxy.cut()
                    *_, last = (line for line in lines if line != "data: [DONE]")
            assert json.loads(last.removeprefix("data: "))["error"]["message"].startswith(
                "the connection to engine core 0 broke"
            )
            wait_for_answers(client)
            assert client.get("/health").status_code == 200
        # Long before it would have answered the streams.
        wait_for(lambda: server.engines[0].num_running == 0, 30, "idle engine")


def test_an_idle_connection_that_breaks_is_mended() -> None:
    with far_server() as (server, proxies), server.client() as client:
        wait_for_answers(client)
        for proxy in proxies:
            proxy.cut()
        time.sleep(0.2)
        wait_for_answers(client)
        assert client.get("/health").status_code == 200


def test_while_the_engine_cannot_be_reached_everybody_is_told_so(tmp_path: Path) -> None:
    """Connections are accepted, /health names the engine; the launcher hears of service once there is some."""
    with far_engines(1, lets_in=False) as (far,), replaced_server(str(tmp_path), far) as (client, child):
        reason = "engine core 0 cannot be reached"
        unreachable = {
            "status": "starting",
            "reason": reason,
            "engines": [{"engine": 0, "status": "unreachable", "reason": reason}],
        }
        wait_for(lambda: client.get("/health").json() == unreachable, PATIENCE_S, "word of the engine")
        assert client.get("/health").status_code == 503
        assert client.post("/v1/completions", json=SHORT).json()["error"]["code"] == "engine_starting"
        far.let_in(True)
        assert child.channel.receive() == Serving()
        assert client.post("/v1/completions", json=SHORT).status_code == 200
        assert client.get("/health").json() == {"status": "ok"}
