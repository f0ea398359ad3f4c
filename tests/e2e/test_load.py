"""Every API server knows the load of every engine core, whoever caused it and however it ended."""

import contextlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.conftest import TINY_FLAGS
from tests.support.server import PATIENCE_S, Server, start_server, wait_for
from tests.support.streams import at_once

pytestmark = pytest.mark.slow

HEADERS = {"Content-Type": "application/json"}


@contextlib.contextmanager
def connection_to(server: Server, pid: int) -> Iterator[http.client.HTTPConnection]:
    """A connection that this API server has accepted."""
    url = httpx.URL(server.url)
    with contextlib.ExitStack() as others:
        while True:
            connection = http.client.HTTPConnection(url.host, url.port, timeout=60)
            others.callback(connection.close)
            connection.request("GET", "/health")
            connection.getresponse().read()
            port = connection.sock.getsockname()[1]
            if any(end.raddr and end.raddr.port == port for end in psutil.Process(pid).net_connections()):
                yield connection
                return


def complete(server: Server, pid: int, max_tokens: int) -> None:
    with connection_to(server, pid) as connection:
        body = {"prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), HEADERS)
        response = connection.getresponse()
        response.read()
        assert response.status == 200


def finished(server: Server) -> list[float]:
    """Answers that each engine core has completed."""
    return [server.metric("request_success_total", engine=name, finished_reason="length") for name in ("0", "1")]


def uses_both(server: Server, pid: int) -> bool:
    """Whether eight requests at once to this API server are spread over both engine cores."""
    before = finished(server)
    at_once([lambda: complete(server, pid, max_tokens=200)] * 8)
    gained = [after - earlier for after, earlier in zip(finished(server), before, strict=True)]
    assert sum(gained) == 8
    return min(gained) >= 2


def test_requests_avoid_a_busy_engine_and_come_back_to_it(tiny_model: Path) -> None:
    """Six endless streams, all from one API server and on one engine core, are dropped. While they run, the API server
    that had nothing to do with them sends its requests elsewhere; afterwards both API servers use both again."""
    with (
        start_server(str(tiny_model), *TINY_FLAGS, "-dp", "2", "-asc", "2") as server,
        contextlib.ExitStack() as streams,
    ):
        busy, idle = server.api_server_pids()
        endless = json.dumps({"prompt": "Once", "max_tokens": 50000, "ignore_eos": True, "stream": True})
        for _ in range(6):
            connection = streams.enter_context(connection_to(server, busy))
            connection.request("POST", "/v1/completions", endless, HEADERS | {"X-data-parallel-rank": "0"})
            answer = streams.enter_context(connection.getresponse())
            # The engine core tells all API servers of a request before it sends the second token.
            assert sum(answer.readline().startswith(b"data:") for _ in range(4)) == 2
        wait_for(lambda: server.metric("num_requests_running", engine="0") == 6, PATIENCE_S, "six running requests")
        before = finished(server)
        for _ in range(4):
            complete(server, idle, max_tokens=4)
        assert finished(server) == [before[0], before[1] + 4]

        streams.close()
        server.check_idle()
        for pid in (idle, busy):
            wait_for(lambda pid=pid: uses_both(server, pid), PATIENCE_S, "use of both engine cores")  # type: ignore[misc]
