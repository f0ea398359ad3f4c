"""A connection to an engine core on another machine that breaks: answers may be lost, so they end; then all goes on."""

import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import httpx
import msgspec
import pytest

from tests.support.api_server import Server, run_server
from tests.support.tcp_proxy import TcpProxy
from tokenmill_engine.ipc.control import EnginesReady, Serving
from tokenmill_engine.messages import Endpoints

pytestmark = pytest.mark.slow

STREAM = {"model": "smol", "prompt": "one two three", "max_tokens": 5000, "stream": True, "ignore_eos": True}
SHORT = {"model": "smol", "prompt": "one two three", "max_tokens": 3, "ignore_eos": True}


@contextmanager
def far_server() -> Iterator[tuple[Server, list[TcpProxy]]]:
    """An API server whose engine is behind two proxies: of its input and of its output."""
    with run_server(ready=False, engine_options={"over_tcp": True, "step_s": 0.01}) as server:
        ready = server.engines[0].ready()
        addresses = (ready.endpoints.input, ready.endpoints.output)
        proxies = [TcpProxy(int(address.rpartition(":")[2])) for address in addresses]
        endpoints = Endpoints(*(f"tcp://127.0.0.1:{proxy.port}" for proxy in proxies))
        (child,) = server.children
        child.channel.send(EnginesReady([msgspec.structs.replace(ready, endpoints=endpoints)]))
        assert isinstance(child.channel.receive(), Serving)
        try:
            yield server, proxies
        finally:
            for proxy in proxies:
                proxy.stop()


def wait_for_answers(client: httpx.Client) -> None:
    deadline = time.monotonic() + 30
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
        assert server.engines[0].num_running == 0


def test_an_idle_connection_that_breaks_is_mended() -> None:
    with far_server() as (server, proxies), server.client() as client:
        wait_for_answers(client)
        for proxy in proxies:
            proxy.cut()
        time.sleep(0.2)
        wait_for_answers(client)
        assert client.get("/health").status_code == 200
