"""The server ends while images of requests are still on their way."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.support.api_server import Server, run_server
from tests.support.media_api import qwen
from tests.support.media_host import MediaHost, answer, media_host
from tests.support.pictures import encoded, noise
from tests.support.server import PATIENCE_S, wait_for
from tests.support.sse import is_error
from tokenmill_engine.ipc.control import Drain, Drained
from tokenmill_server.multimodal.settings import MediaSettings

pytestmark = pytest.mark.slow

PATH = "/v1/chat/completions"
SETTINGS = MediaSettings(allowed_domains=("localhost",), fetch_timeout_s=600.0, loading_threads=2)


@pytest.fixture
def arrives() -> Iterator[threading.Event]:
    """Set: the host answers. At the end it does in any case."""
    event = threading.Event()
    yield event
    event.set()


@contextmanager
def asked(arrives: threading.Event, **fields: Any) -> Iterator[tuple[Server, "Future[httpx.Response]", httpx.Client]]:
    """A server, an open request whose image is on its way, and another client."""
    whole = answer(encoded(noise(20, 30)))

    def handle(connection: socket.socket) -> None:
        arrives.wait(PATIENCE_S)
        whole(connection)

    with (
        media_host(slow=handle) as host,
        run_server(engine=qwen(), engine_options={"max_model_len": 1024}, media=SETTINGS) as server,
        server.client() as client,
        server.client() as other,
        ThreadPoolExecutor(1) as threads,
    ):
        reply = threads.submit(client.post, PATH, json=body(host, **fields))
        wait_for(lambda: host.paths == ["/slow"], PATIENCE_S, "request to the host")
        yield server, reply, other


def body(host: MediaHost, **fields: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": host.url("/slow")}}]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 4, **fields}


def test_a_request_whose_image_comes_in_time_is_answered(arrives: threading.Event) -> None:
    with asked(arrives) as (server, reply, other):
        server.children[0].channel.send(Drain(PATIENCE_S))
        wait_for(lambda: other.get("/health").status_code == 503, PATIENCE_S, "readiness off")
        assert not reply.done()
        arrives.set()
        assert reply.result(PATIENCE_S).status_code == 200
        assert server.children[0].channel.receive() == Drained(num_cut_off=0)
        assert server.children[0].process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_image_does_not_come_is_refused_in_the_end(arrives: threading.Event, stream: bool) -> None:
    with asked(arrives, stream=stream) as (server, reply, _):
        server.children[0].channel.send(Drain(0.1))
        assert is_error(reply.result(PATIENCE_S), 503, code="server_shutting_down")
        assert server.children[0].channel.receive() == Drained(num_cut_off=1)
        assert server.children[0].process.wait(PATIENCE_S) == 0
        assert not server.engines[0].added
