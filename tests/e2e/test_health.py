"""Engine cores that live but get nothing done: their main thread is held, as by a device that never answers."""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import TINY_FLAGS
from tests.support.held_thread import held_main_thread
from tests.support.server import PATIENCE_S, Server, start_server, wait_for
from tests.support.streams import BackgroundStream

pytestmark = pytest.mark.slow

ENDLESS = {"prompt": "Once", "max_tokens": 50000, "ignore_eos": True}
STALL_S = 6
"""Between twice this and once this a test has time for what it does with a stalled engine core."""


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    flags = ("-dp", "2", "--max-engine-restarts", "1", "--engine-stall-timeout", str(STALL_S))
    with start_server(str(tiny_model), *TINY_FLAGS, *flags) as server:
        yield server


def stream(server: Server, rank: int) -> BackgroundStream:
    one = BackgroundStream(server.url, "/v1/completions", headers={"X-data-parallel-rank": str(rank)}, **ENDLESS)
    one.wait_for_events(3)
    return one


def health(server: Server) -> tuple[int, str, list[tuple[int, str]]]:
    response = server.http.get("/health")
    body: dict[str, Any] = response.json()
    return response.status_code, body["status"], [(e["engine"], e["status"]) for e in body.get("engines", [])]


def test_a_stalled_engine_core_is_out_of_rotation_until_it_gets_on(server: Server) -> None:
    kept = stream(server, 0)
    with held_main_thread(server.engine_pids()[0]):
        wait_for(lambda: health(server) == (200, "ok", [(0, "stalled")]), PATIENCE_S, "stalled engine core")
        assert server.metric("engine_stalled", engine="0") == 1
        assert server.metric("engine_up", engine="0") == 1
        for _ in range(4):
            assert server.text("a", max_tokens=2)
    wait_for(lambda: health(server) == (200, "ok", []), PATIENCE_S, "recovery")
    assert server.metric("engine_stalled") == 0
    kept.wait_for_events(len(kept.stream.events) + 20)
    kept.leave()
    assert kept.stream.error is None
    assert "was killed" not in server.log


def test_a_stalled_engine_core_is_killed_in_the_end_and_its_requests_are_answered(server: Server) -> None:
    """Also if the kernel does not let it die. It is started again once it is gone. An idle one that is held for longer
    than the bound is nobody's loss: nobody waits for it, so nobody is told anything."""
    wait_for(lambda: server.metric("num_requests_running") == 0, PATIENCE_S, "idle server")
    # Behind a request that is left a step may still be under way, but none behind an answer of known length.
    fields = {"prompt": "a", "max_tokens": 2, "ignore_eos": True}
    assert server.http.post("/v1/completions", json=fields, headers={"X-data-parallel-rank": "0"}).status_code == 200
    lost = stream(server, 1)
    idle, busy = server.engine_pids()
    held_at = time.monotonic()
    with contextlib.ExitStack() as idle_one:
        idle_one.enter_context(held_main_thread(idle))
        with held_main_thread(busy, hides_death=True):
            wait_for(lambda: health(server)[2] != [], PATIENCE_S, "stalled engine core")
            assert health(server) == (200, "ok", [(1, "stalled")])
            idle_one.close()
            answer = lost.result()
            assert lost.ended_at - held_at >= 2 * STALL_S - 2
            assert health(server) == (200, "ok", [(1, "restarting")])
            assert server.metric("engine_up", engine="1") == 0
            assert server.text("a", max_tokens=2)
    assert answer.error is not None
    assert answer.error["message"] == f"engine core 1 had work but finished no step for {2 * STALL_S} s and was killed"
    wait_for(lambda: health(server) == (200, "ok", []), 2 * PATIENCE_S, "restarted engine core")
    assert server.metric("engine_restarts_total", engine="1") == 1


def test_a_server_whose_engine_cores_are_all_stalled_says_no(server: Server) -> None:
    streams = [stream(server, rank) for rank in (0, 1)]
    first, second = server.engine_pids()
    with held_main_thread(first), held_main_thread(second):
        wait_for(lambda: health(server) == (503, "stalled", [(0, "stalled"), (1, "stalled")]), PATIENCE_S, "503")
        assert server.http.get("/ping").status_code == 503
    wait_for(lambda: health(server) == (200, "ok", []), PATIENCE_S, "recovery")
    for one in streams:
        one.leave()
        assert one.stream.error is None, json.dumps(one.stream.error)
