"""Clients that go away free what they held, at once and completely."""

from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import TINY_FLAGS
from tests.support.server import PATIENCE_S, Server, start_server, wait_for
from tests.support.streams import raw_request, read_stream

pytestmark = pytest.mark.slow


def test_all_choices_end_with_their_stream(tiny_server: Server) -> None:
    """Fifty times: four endless choices, left after three chunks. Memory does not grow."""
    fields = {"prompt": "Once", "n": 4, "max_tokens": 4000, "ignore_eos": True}

    def leave_early() -> None:
        read_stream(tiny_server.url, "/v1/completions", fields, lambda stream: len(stream.events) < 3)

    for _ in range(10):
        leave_early()
        tiny_server.check_idle()
    pids = [*tiny_server.engine_pids(), *tiny_server.api_server_pids()]
    before = [psutil.Process(pid).memory_info().rss for pid in pids]
    for _ in range(40):
        leave_early()
    tiny_server.check_idle()
    after = [psutil.Process(pid).memory_info().rss for pid in pids]
    assert all(late - early < 16 * 2**20 for early, late in zip(before, after, strict=True))
    generated = tiny_server.metric("generation_tokens_total")
    tiny_server.complete(max_tokens=8, ignore_eos=True)
    assert tiny_server.metric("generation_tokens_total") == generated + 8, "only what somebody waits for is generated"
    tiny_server.check_alive()


@pytest.mark.parametrize("stream", [True, False])
def test_gauges_fall_when_everybody_vanishes_at_once(tiny_model: Path, stream: bool) -> None:
    """Twelve running and eight waiting requests over two API servers, all dropped; nothing is sent afterwards."""
    with start_server(str(tiny_model), *TINY_FLAGS, "-asc", "2", "--max-num-seqs", "12") as server:
        fields = {"prompt": "Once", "max_tokens": 20000, "ignore_eos": True, "stream": stream}
        connections = [raw_request(server.url, "/v1/completions", fields) for _ in range(20)]
        states = ("num_requests_running", "num_requests_waiting")
        wait_for(lambda: [server.metric(name) for name in states] == [12, 8], PATIENCE_S, "twelve requests and eight")
        assert server.metric("kv_cache_usage_perc") > 0
        for connection in connections:
            connection.close()
        server.check_idle()
        assert server.metric("request_success_total", finished_reason="abort") == 20
