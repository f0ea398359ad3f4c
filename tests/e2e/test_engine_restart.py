"""An engine core of several dies or hangs: its requests get an answer, the others go on, and it comes back."""

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import TINY_FLAGS
from tests.support.connections import get_from_each, ports_taken_by_each
from tests.support.held_thread import held_main_thread
from tests.support.server import PATIENCE_S, Server, check_error, start_server, wait_for
from tests.support.streams import BackgroundStream

pytestmark = pytest.mark.slow

ENDLESS = {"prompt": "Once", "max_tokens": 50000, "ignore_eos": True}
RESTART_S = 2 * PATIENCE_S
"""How long a restarted engine core may take."""


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    """Two engine cores, two API servers."""
    with start_server(str(tiny_model), *TINY_FLAGS, "-dp", "2", "-asc", "2", "--max-engine-restarts", "50") as server:
        yield server


@pytest.fixture(autouse=True)
def _all_serve(server: Server) -> None:
    """Whatever a test did, the next one finds everybody in rotation."""
    wait_until_all_serve(server)


def wait_until_all_serve(server: Server) -> None:
    wait_for(
        lambda: server.metric("engine_up") == 2 and healths(server) == [(200, [])] * 2,
        RESTART_S,
        "server with both engine cores",
    )


def healths(server: Server) -> list[tuple[int, list[dict[str, Any]]]]:
    """Status and missing engine cores as each API server sees them."""
    return [(status, json.loads(body).get("engines", [])) for status, body in get_from_each(server, "/health")]


def stream(server: Server, rank: int, **fields: Any) -> BackgroundStream:
    """An endless request to one engine core."""
    headers = {"X-data-parallel-rank": str(rank)}
    return BackgroundStream(server.url, "/v1/completions", headers=headers, **ENDLESS, **fields)


def pinned(server: Server, rank: int) -> httpx.Response:
    fields = {"prompt": "a", "max_tokens": 4}
    with httpx.Client(base_url=server.url, trust_env=False, timeout=PATIENCE_S) as client:
        return client.post("/v1/completions", json=fields, headers={"X-data-parallel-rank": str(rank)})


def test_a_killed_engine_core_takes_only_its_own_requests_with_it(server: Server) -> None:
    for rank in (0, 1):
        assert pinned(server, rank).status_code == 200
    tokens = server.metric("generation_tokens_total", engine="1")
    finished = server.metric("request_success_total", engine="1")
    failed = server.metric("request_success_total", engine="1", finished_reason="error")
    restarts = server.metric("engine_restarts_total", engine="1")
    lost = [stream(server, 1), stream(server, 1), stream(server, 1, stream=False)]
    kept = stream(server, 0, n=2)
    for one in (*lost[:2], kept):
        one.wait_for_events(3)
    wait_for(lambda: server.metric("num_requests_running", engine="1") == 3, PATIENCE_S, "three running requests")
    processes = {process.pid for process in server.descendants()}
    server.kill(server.engine_pids()[1])
    newcomer = wait_for_newcomer(server, processes)
    with held_main_thread(newcomer):
        check_answered(lost)
        check_rotation_without(server, 1)
        seen = len(kept.stream.events)
        kept.wait_for_events(seen + 20)
        assert kept.is_alive()
    wait_until_all_serve(server)
    assert pinned(server, 1).status_code == 200
    assert server.metric("engine_restarts_total", engine="1") == restarts + 1
    assert server.metric("generation_tokens_total", engine="1") > tokens + 4
    assert server.metric("request_success_total", engine="1") == finished + 1 + len(lost)
    assert server.metric("request_success_total", engine="1", finished_reason="error") == failed + len(lost)
    assert server.metric("num_requests_running", engine="1") == 0
    assert kept.is_alive()
    kept.leave()
    assert kept.stream.error is None


def test_another_answers_what_a_killed_engine_core_had_not(tiny_model: Path) -> None:
    """Where two others are left."""
    with start_server(str(tiny_model), *TINY_FLAGS, "-dp", "3") as server:
        wait_for(lambda: server.metric("engine_up") == 3, PATIENCE_S, "three engine cores")
        os.kill(server.engine_pids()[1], signal.SIGSTOP)
        sent = server.metric("engine_message_bytes_total", engine="1")
        body = {"prompt": "Once upon", "max_tokens": 5, "ignore_eos": True, "n": 2}
        client = httpx.Client(base_url=server.url, trust_env=False, timeout=PATIENCE_S)
        with client, ThreadPoolExecutor() as pool:
            free = [pool.submit(client.post, "/v1/completions", json=body) for _ in range(6)]
            wait_for(
                lambda: server.metric("engine_message_bytes_total", engine="1") > sent,
                PATIENCE_S,
                "requests on their way",
            )
            server.kill(server.engine_pids()[1])
            answers = [each.result() for each in free]
        assert [answer.status_code for answer in answers] == [200] * 6, [answer.text for answer in answers]
        assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {10}
        assert re.search(r"others have \d of its \d requests", server.log)


def check_answered(lost: list[BackgroundStream]) -> None:
    """By an error each."""
    for one in lost:
        answer = one.result()
        if answer.error is not None:
            assert answer.done
            error = answer.error
            assert [event for event in answer.events if "error" in event] == answer.events[-1:]
        else:
            assert answer.status == 500
            error = json.loads(answer.body)["error"]
        assert error["code"] == "engine_dead"
        assert error["message"].startswith("engine core 1 was killed (SIGKILL)")


def check_rotation_without(server: Server, rank: int) -> None:
    """While `rank` is gone the server is healthy, says so, and uses the other one."""
    wait_for(
        lambda: all(misses_only(rank, *health) for health in healths(server)), PATIENCE_S, "health that tells of it"
    )
    refused = pinned(server, rank)
    assert check_error(refused, 503)["code"] == "engine_unavailable"
    assert refused.headers["retry-after"] == "1"
    metrics = server.metrics()
    assert [value for name, value in metrics.items() if name.startswith(f"engine_up{{engine={rank}")] == [0]
    assert not any(name.startswith(f"num_requests_running{{engine={rank}") for name in metrics)
    for _ in range(6):
        assert server.text("a", max_tokens=2)


def misses_only(rank: int, status: int, missing: list[dict[str, Any]]) -> bool:
    """Whether health tells that `rank` is restarted. That is never a reason to be unhealthy."""
    assert status == 200
    return [(engine["engine"], engine["status"]) for engine in missing] == [(rank, "restarting")]


def wait_for_newcomer(server: Server, known: set[int]) -> int:
    """The pid of an engine core that has just been started and is far from ready; `known` are the older processes."""
    newcomers: list[int] = []

    def has_come() -> bool:
        with contextlib.suppress(psutil.Error):
            newcomers.extend(
                process.pid
                for process in server.descendants()
                if process.pid not in known
                and re.search(r"tokenmill_engine\.process|tokenmill: engine core", " ".join(process.cmdline()))
            )
        return bool(newcomers)

    wait_for(has_come, PATIENCE_S, "restarted engine core", poll_s=0.01)
    return newcomers[0]


def test_an_engine_core_that_is_stopped_is_replaced_within_seconds(server: Server) -> None:
    hung, kept = stream(server, 0), stream(server, 1)
    hung.wait_for_events()
    kept.wait_for_events()
    os.kill(server.engine_pids()[0], signal.SIGSTOP)
    error = hung.result().error
    assert error is not None
    assert error["message"] == "engine core 0 was stopped (SIGSTOP) for 5 s and was killed"
    assert kept.is_alive()
    wait_until_all_serve(server)
    assert pinned(server, 0).status_code == 200
    kept.leave()
    assert kept.stream.error is None


def test_an_api_server_that_is_stopped_is_replaced_within_seconds(server: Server) -> None:
    streams: list[BackgroundStream] = []
    while len(streams) < 4 or not all(taken := ports_taken_by_each(server, (one.stream.port for one in streams))):
        streams.append(stream(server, len(streams) % 2))
        streams[-1].wait_for_events()
    os.kill(server.api_server_pids()[0], signal.SIGSTOP)
    wait_for(lambda: sum(one.stream.broken for one in streams) == taken[0], PATIENCE_S, "broken streams")
    wait_for(
        lambda: "API server 0 was stopped (SIGSTOP) for 5 s and was killed" in server.log,
        PATIENCE_S,
        "line that says so",
    )
    wait_for(lambda: len(server.api_server_pids()) == 2, PATIENCE_S, "second API server")
    assert sum(one.is_alive() for one in streams) == taken[1]
    for one in streams:
        one.leave()
    server.drop_connections()  # some may have been to the one that was stopped
    wait_for(lambda: server.metric("num_requests_running") == 0, PATIENCE_S, "idle server")


def test_everybody_comes_back_when_an_api_server_dies_while_an_engine_core_loads(server: Server) -> None:
    num_lost, num_replaced = (server.log.count(line) for line in ("starting it again", "starting another"))
    server.kill(server.engine_pids()[1])
    wait_for(lambda: server.log.count("starting it again") > num_lost, PATIENCE_S, "loss of an engine core")
    for pid in server.api_server_pids():
        server.kill(pid)
    wait_for(lambda: server.log.count("starting another") == num_replaced + 2, PATIENCE_S, "replacements")
    server.drop_connections()
    wait_until_all_serve(server)
    for _ in range(4):
        assert pinned(server, 1).status_code == 200


def test_a_drain_while_an_engine_core_loads(tiny_model: Path) -> None:
    """What is open on the other one is finished, and the end is a good one."""
    with start_server(str(tiny_model), *TINY_FLAGS, "-dp", "2") as server:
        fields = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True}
        kept = BackgroundStream(server.url, "/v1/completions", headers={"X-data-parallel-rank": "0"}, **fields)
        kept.wait_for_events()
        server.kill(server.engine_pids()[1])
        wait_for(lambda: "starting it again" in server.log, PATIENCE_S, "restart")
        assert server.stop() == 0
        answer = kept.result()
        assert answer.error is None
        assert answer.finish_reasons() == ["length"]
        assert server.log.splitlines()[-1].endswith("all requests are finished; stopped")
