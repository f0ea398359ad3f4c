"""What clients see while a server starts, drains, or loses its engine; and what their own going away does."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.api_server import MODEL_NAME, Server, engine_config, run_server
from tests.support.echo_engine import POISON
from tests.support.media_api import qwen
from tests.support.server import PATIENCE_S, wait_for
from tests.support.sse import is_error, post_stream
from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.ipc.child import ChildProcess, spawn_child
from tokenmill_engine.ipc.control import Drain, Drained, EngineLost, EnginesReady, FromApiServer, StartFailed
from tokenmill_engine.messages import FinishReason
from tokenmill_server.config import ServerConfig
from tokenmill_server.control import ApiServerStart

pytestmark = pytest.mark.slow

PATH = "/v1/completions"
LONG = {"model": MODEL_NAME, "prompt": "one two three", "max_tokens": 8000, "temperature": 0}
SHORT = LONG | {"max_tokens": 3}
PYTHONS_INTERVAL_S = 0.005
"""Between switches of threads, by itself. In the process of the tests others may have set it."""


def wait_until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    wait_for(condition, timeout_s, "such state", poll_s=0.01)


def raw_request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


@contextlib.contextmanager
def open_stream(server: Server, body: dict[str, Any]) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun."""
    with server.client() as client, client.stream("POST", PATH, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        yield lines


def test_while_the_model_loads() -> None:
    with run_server(ready=False) as server, server.client() as client:
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "starting")
        for body in (SHORT, {}):
            response = client.post(PATH, json=body)
            assert is_error(response, 503, code="engine_starting")
            assert response.headers["retry-after"] == "1"
        assert client.post("/tokenize", json={"prompt": "one"}).status_code == 200
        server.announce_engines()
        assert client.post(PATH, json=SHORT).status_code == 200


def test_death_of_the_engine_answers_everyone_at_once() -> None:
    """The front end's part."""
    with run_server(engine_options={"step_s": 0.01}) as server, ThreadPoolExecutor(4) as pool:

        def post() -> httpx.Response:
            with server.client() as client:
                return client.post(PATH, json=LONG)

        waiting = [pool.submit(post) for _ in range(4)]
        with open_stream(server, LONG | {"n": 2}) as lines:
            wait_until(lambda: server.engines[0].num_running == 6)
            server.engines[0].paused.set()
            server.children[0].channel.send(EngineLost(0, 0, "engine core 0 was killed"))
            rest = [line for line in lines if line]
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "engine_dead"
        assert rest[-1] == "data: [DONE]"
        for future in waiting:
            assert is_error(future.result(PATIENCE_S), 500, code="engine_dead")
        with server.client() as client:
            health = client.get("/health")
            assert (health.status_code, health.json()["reason"]) == (503, "engine core 0 was killed")
            assert is_error(client.post(PATH, json=SHORT), 500, code="engine_dead")


def test_drain_finishes_what_is_open_and_takes_nothing_new() -> None:
    with run_server(engine_options={"step_s": 0.01}) as server, server.client() as client:
        body = LONG | {"max_tokens": 60}
        with open_stream(server, body) as lines:
            server.engines[0].paused.set()
            server.children[0].channel.send(Drain(PATIENCE_S))
            wait_until(lambda: client.get("/health").status_code == 503)
            refused = client.post(PATH, json=SHORT)
            assert is_error(refused, 503, code="server_shutting_down")
            assert refused.headers["retry-after"] == "1"
            assert client.get("/health").json()["status"] == "draining"
            server.engines[0].paused.clear()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert len(rest) == 60
        assert server.children[0].channel.receive() == Drained(num_cut_off=0)
        assert server.children[0].process.wait(PATIENCE_S) == 0


def test_drain_ends_in_time() -> None:
    with run_server(engine_options={"step_s": 0.01}) as server, open_stream(server, LONG) as lines:
        server.children[0].channel.send(Drain(0.1))
        rest = [line for line in lines if line]
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "server_shutting_down"
        assert rest[-1] == "data: [DONE]"
        assert server.children[0].channel.receive() == Drained(num_cut_off=1)
        assert server.children[0].process.wait(PATIENCE_S) == 0


def test_a_drain_that_is_cut_short_still_tells_clients() -> None:
    with run_server(engine_options={"step_s": 0.01}) as server, open_stream(server, LONG) as lines:
        server.children[0].channel.send(Drain(600.0))
        server.children[0].channel.send(Drain(0.0))
        rest = [line for line in lines if line]
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "server_shutting_down"
        assert rest[-1] == "data: [DONE]"
        assert server.children[0].channel.receive() == Drained(num_cut_off=1)
        assert server.children[0].process.wait(PATIENCE_S) == 0


def test_death_of_the_engine_during_a_drain() -> None:
    with run_server(engine_options={"step_s": 0.01}) as server, open_stream(server, LONG) as lines:
        server.children[0].channel.send(Drain(600.0))
        server.children[0].channel.send(EngineLost(0, 0, "engine core 0 was killed"))
        rest = [line for line in lines if line]
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "engine_dead"
        assert rest[-1] == "data: [DONE]"
        assert isinstance(server.children[0].channel.receive(), Drained)
        assert server.children[0].process.wait(PATIENCE_S) == 0


def test_death_of_an_engine_that_nobody_is_connected_to_yet() -> None:
    with run_server(ready=False) as server, server.client() as client:
        server.engines[0].stop()
        server.children[0].channel.send(EnginesReady([server.engines[0].ready()]))
        server.children[0].channel.send(EngineLost(0, 0, "engine core 0 was killed"))
        wait_until(lambda: client.get("/health").json()["status"] == "dead")
        assert is_error(client.post(PATH, json=SHORT), 500, code="engine_dead")
        server.engines[0].start()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_stops_all_its_choices(server: Server, stream: bool) -> None:
    """Nothing is left open, in the engine or here, and it is nobody's error but the client's."""

    def counted(status: str) -> float:
        with server.client() as client:
            lines = client.get("/metrics").text.splitlines()
        series = f'http_requests_total{{handler="{PATH}",method="POST",status="{status}"}} '
        return sum(float(line.removeprefix(series)) for line in lines if line.startswith(series))

    client_errors, server_errors = counted("4xx"), counted("5xx")
    engine = server.engines[0]
    engine.paused.set()
    before = len(engine.aborted)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(raw_request(LONG | {"n": 4, "stream": stream}))
        wait_until(lambda: engine.num_running == 4)
    wait_until(lambda: engine.num_running == 0)
    engine.paused.clear()
    assert [reason for _, reason in engine.aborted[before:]] == [FinishReason.ABORT] * 4
    wait_until(lambda: counted("4xx") == client_errors + 1)
    assert counted("5xx") == server_errors


def test_a_client_that_leaves_in_the_middle_of_a_stream(server: Server) -> None:
    engine = server.engines[0]
    engine.step_s = 0.005
    with open_stream(server, LONG | {"n": 4}) as lines:
        for _ in range(20):
            next(lines)
    wait_until(lambda: engine.num_running == 0, 30)  # computing on would take longer
    engine.step_s = 0.0


def test_a_request_that_fails_in_the_engine(client: httpx.Client) -> None:
    body = SHORT | {"prompt": [POISON, 504]}
    for stream in (False, True):
        response = client.post(PATH, json=body | {"stream": stream})
        assert is_error(response, 500, code="engine_error")
        assert response.headers["x-should-retry"] == "false"
        assert response.headers["content-type"] == "application/json"
    assert client.post(PATH, json=SHORT).status_code == 200


def test_two_api_servers_and_two_engines() -> None:
    """Every server reaches every engine; equal client ids in flight on both do not meet."""
    with run_server(2, api_server_count=2, engine_options={"step_s": 0.002}) as server, ThreadPoolExecutor(8) as pool:

        def post(index: int) -> httpx.Response:
            with server.client() as client:
                return client.post(PATH, json=LONG | {"max_tokens": 64}, headers={"X-Request-Id": "dup"})

        def api_servers() -> set[int]:
            return {request.request_id >> 48 for engine in server.engines for request in engine.added}

        responses = list(pool.map(post, range(24)))
        deadline = time.monotonic() + PATIENCE_S
        while api_servers() != {0, 1}:
            assert time.monotonic() < deadline, "an API server gets no connections"
            responses.append(post(len(responses)))
        assert {response.json()["choices"][0]["text"] for response in responses} == {
            ("one two three" * 22)[: len("one two three" * 21 + "one")]
        }
        assert all(response.headers["x-request-id"] == "dup" for response in responses)
        added = [request.request_id for engine in server.engines for request in engine.added]
        assert len(set(added)) == len(responses)
        assert all(len(engine.added) >= 5 for engine in server.engines)
        with server.client() as client:
            pinned = client.post(PATH, json=SHORT, headers={"X-data-parallel-rank": "1"})
            assert pinned.status_code == 200
            assert is_error(client.post(PATH, json=SHORT, headers={"X-data-parallel-rank": "2"}), 400)
            metrics = client.get("/metrics").text
        counts = [
            float(line.rpartition(" ")[2])
            for line in metrics.splitlines()
            if line.startswith("tokenmill:e2e_request_latency_seconds_count")
        ]
        assert sum(counts) == len(responses) + 1
        assert "pid=" not in metrics


def test_connections_are_spread_over_the_servers() -> None:
    with run_server(api_server_count=2) as server, contextlib.ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))

        def open_connections() -> list[int]:
            pids = [child.process.pid for child in server.children]
            return [
                sum(
                    c.laddr.port == server.port and c.status == "ESTABLISHED"
                    for c in psutil.Process(pid).net_connections()
                )
                for pid in pids
            ]

        wait_until(lambda: sum(open_connections()) == 60)
        # Who does not take its own for milliseconds, for want of a processor, leaves some to the other.
        assert all(20 <= count <= 40 for count in open_connections())


def test_no_torch_and_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch installed, a server that has answered a chat has loaded neither torch nor transformers."""
    assert (
        subprocess.run([sys.executable, "-c", "import importlib.util as u; assert u.find_spec('torch')"]).returncode
        == 0
    )
    monkeypatch.setenv("FACTS_FILE", str(tmp_path / "facts"))
    with run_server(module="tests.support.reporting_api_process") as server, server.client() as client:
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, "logprobs": True}
        assert post_stream(client, "/v1/chat/completions", chat).text()
        assert client.get("/metrics").status_code == 200
        process = psutil.Process(server.children[0].process.pid)
        assert process.memory_info().rss < 150e6
        server.children[0].channel.send(Drain(1.0))
        assert process.wait(PATIENCE_S) == 0
    facts = json.loads((tmp_path / "facts").read_text())
    modules = set(facts["modules"])
    assert "tokenizers" in modules
    assert not modules & {"torch", "transformers", "triton", "safetensors"}
    assert (facts["switch_interval_s"], facts["returns_large_blocks"]) == (PYTHONS_INTERVAL_S, False)


def test_who_prepares_media_gives_way_to_the_event_loop_and_keeps_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FACTS_FILE", str(tmp_path / "facts"))
    with run_server(engine=qwen(), module="tests.support.reporting_api_process") as server:
        server.children[0].channel.send(Drain(1.0))
        assert server.children[0].process.wait(PATIENCE_S) == 0
    facts = json.loads((tmp_path / "facts").read_text())
    assert facts["switch_interval_s"] < PYTHONS_INTERVAL_S
    assert facts["returns_large_blocks"]


def test_a_server_whose_launcher_is_gone_cleans_up_and_ends() -> None:
    with run_server() as server:
        process = server.children[0].process
        server.children[0].channel._socket.shutdown(socket.SHUT_RDWR)
        assert process.wait(PATIENCE_S) == 1
        assert not os.path.exists(server.run_dir)
        os.mkdir(server.run_dir)


def test_a_question_to_a_launcher_that_is_gone_ends_the_server_without_a_word(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Somebody asks for metrics of other machines before the end of the launcher's channel was read."""
    with run_server(2) as server, server.client() as client:
        child = server.children[0]
        with socket.socket(fileno=os.dup(child.channel.fileno())) as channel:
            channel.shutdown(socket.SHUT_RD)  # as far as the server can send; what it reads has not ended
            with pytest.raises(httpx.TransportError):
                client.get("/metrics")
            assert child.process.wait(PATIENCE_S) == 1
        assert not Path(server.run_dir).exists()
        os.mkdir(server.run_dir)  # for whoever removes it
    assert "Traceback" not in capfd.readouterr().err


def test_a_server_whose_folder_vanished_has_no_metrics_but_goes_on() -> None:
    with run_server() as server, server.client() as client:
        shutil.rmtree(server.run_dir)
        response = client.get("/metrics")
        assert is_error(response, 500, code="metrics_lost")
        assert client.post(PATH, json=SHORT).status_code == 200
        os.mkdir(server.run_dir)


def test_starts_that_fail_say_why_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    server = ServerConfig(served_model_names=("x",))
    gone = tmp_path / "gone"
    assert why_not(gone, server, engine_config()) == f"API server 0 cannot start: the folder {gone} was removed"
    assert "no tokenizer.json" in why_not(tmp_path, server, engine_config(tokenizer_path=str(tmp_path)))
    (tmp_path / "failing_code.py").write_text("class Asking:\n    def __init__(self, app, secret): ...\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    reason = why_not(tmp_path, replace(server, middleware=("failing_code.Asking",)), engine_config())
    assert reason.startswith("--middleware failing_code.Asking: it cannot be made: TypeError: ")
    assert "Traceback" not in capfd.readouterr().err


def why_not(run_dir: Path, server: ServerConfig, engine: EngineConfig) -> str:
    """What a start says that fails."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        child: ChildProcess[FromApiServer] = spawn_child(
            "tokenmill_server.api_process",
            FromApiServer,
            pass_fds=(listener.fileno(),),
            env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(run_dir)},
        )
        child.channel.send(ApiServerStart(0, 0, str(run_dir), listener.fileno(), server, engine))
        message = child.channel.receive()
        assert isinstance(message, StartFailed)
        assert child.process.wait(PATIENCE_S) == 1
        child.channel.close()
    return message.message


def test_a_slow_reader_does_not_slow_the_others(server: Server) -> None:
    """What it does not read waits in memory; the engine goes on and everyone else is served."""
    request = json.dumps(LONG | {"n": 8, "stream": True, "ignore_eos": True}).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(request)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + request)
        wait_until(lambda: server.engines[0].num_running == 8)
        with server.client() as client:
            assert client.post(PATH, json=SHORT).status_code == 200
        wait_until(lambda: server.engines[0].num_running == 0, 4 * PATIENCE_S)
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += connection.recv(1 << 20)
    assert received.count(b"data: {") >= 8 * 8000
