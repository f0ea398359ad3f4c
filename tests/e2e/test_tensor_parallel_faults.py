"""Worker processes die (`-tp`): with their engine core, at once, and nobody else with them."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import TINY_FLAGS
from tests.support.faults import Traces, traced_server
from tests.support.server import Server, wait_for
from tests.support.streams import BackgroundStream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ANSWER_S = 60.0
"""How long anybody may wait for anything after a fault, on a busy machine."""
RETURN_S = 120.0
ENDLESS = {"prompt": "Once", "max_tokens": 50000, "ignore_eos": True}


def stream(server: Server, rank: int, **fields: Any) -> BackgroundStream:
    """An endless request to one engine core."""
    headers = {"X-Data-Parallel-Rank": str(rank)}
    return BackgroundStream(server.url, "/v1/completions", headers=headers, **ENDLESS, **fields)


def ask(server: Server, rank: int) -> httpx.Response:
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
        body = {"prompt": "The mill", "max_tokens": 8, "temperature": 0}
        return client.post("/v1/completions", json=body, headers={"X-Data-Parallel-Rank": str(rank)})


def text(server: Server, rank: int) -> str:
    response = ask(server, rank)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def wait_for_end(processes: list[psutil.Process], timeout_s: float = ANSWER_S) -> None:
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    assert alive == [], f"still there after {timeout_s} s: {[process.cmdline() for process in alive]}"


VICTIMS: dict[str, Callable[[Server], int]] = {
    "worker": lambda server: server.worker_pids(1)[1],
    "engine core": lambda server: server.engine_pids()[1],
}


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_kill_takes_one_engine_core_and_its_workers(split_server: Server, victim: str) -> None:
    """Its requests get an error, the others go on, and it is back with new workers."""
    server = split_server
    wait_for(lambda: health(server) == (200, []), RETURN_S, "a server that misses nobody")
    expected = text(server, 1)
    assert text(server, 0) == expected
    lost = [stream(server, 1), stream(server, 1), stream(server, 1, stream=False)]
    kept = stream(server, 0)
    for one in (*lost[:2], kept):
        one.wait_for_events(3)
    wait_for(lambda: server.metric("num_requests_running", engine="1") == 3, ANSWER_S, "three running requests")
    restarts = server.metric("engine_restarts_total", engine="1")
    processes = [psutil.Process(pid) for pid in (server.engine_pids()[1], *server.worker_pids(1))]
    others = [server.engine_pids()[0], *server.worker_pids(0)]
    server.kill(VICTIMS[victim](server))
    check_answered(lost, "worker 1.1" if victim == "worker" else "engine core 1 was killed")
    wait_for_end(processes)
    wait_for(lambda: server.metric("engine_restarts_total", engine="1") == restarts + 1, RETURN_S, "a restart")
    wait_for(lambda: ask(server, 1).status_code == 200, RETURN_S, "the engine core that was lost", poll_s=0.2)
    assert text(server, 1) == expected
    assert [server.engine_pids()[0], *server.worker_pids(0)] == others
    assert len(server.worker_pids(1)) == 2
    assert not {process.pid for process in processes} & set(server.worker_pids(1))
    seen = len(kept.stream.events)
    kept.wait_for_events(seen + 20)
    kept.leave()
    assert kept.stream.error is None
    wait_for(lambda: health(server) == (200, []), RETURN_S, "a server that misses nobody")
    wait_for(lambda: server.metric("num_requests_running") == 0, ANSWER_S, "a server without requests")


def check_answered(lost: list[BackgroundStream], culprit: str) -> None:
    """By an error each, which says whose fault it is."""
    for one in lost:
        answer = one.result(ANSWER_S)
        error = answer.error or json.loads(answer.body)["error"]
        assert answer.done or answer.status == 500
        assert error["code"] == "engine_dead"
        assert error["message"].startswith("engine core 1 ")
        assert culprit in error["message"]


def health(server: Server) -> tuple[int, list[Any]]:
    response = server.http.get("/health")
    return response.status_code, response.json().get("engines", [])


def status_of(server: Server) -> int | None:
    """Of /health; None if nobody listens any more."""
    try:
        return health(server)[0]
    except httpx.TransportError:
        return None


@dataclass(frozen=True)
class Fault:
    """Something that happens to a server with one engine core and two workers."""

    do: Callable[[Server], None]
    status: int
    """With which the server ends."""
    words: str = ""
    """In its last line."""
    flags: tuple[str, ...] = ()


def stop_worker(server: Server) -> None:
    os.kill(server.worker_pids()[1], signal.SIGSTOP)


def stop_worker_in_drain(server: Server) -> None:
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: status_of(server) == 503, ANSWER_S, "a server that drains")
    stop_worker(server)


STOPPED = "engine core 0 is lost: worker 0.1 was stopped (SIGSTOP) for 5 s"
FAULTS = {
    "killed worker": Fault(lambda server: server.kill(server.worker_pids()[0]), 1, "worker 0.0 was killed (SIGKILL)"),
    "stopped worker": Fault(stop_worker, 1, STOPPED),
    "stopped worker, steps that must be short": Fault(stop_worker, 1, STOPPED, ("--engine-stall-timeout", "5")),
    "stopped worker in a drain": Fault(stop_worker_in_drain, 1, STOPPED, ("--shutdown-timeout", "60")),
    "killed launcher": Fault(lambda server: server.kill(server.process.pid), -signal.SIGKILL),
}


@pytest.mark.parametrize("name", FAULTS)
def test_nothing_is_left(tiny_model: Path, name: str) -> None:
    """Of the only engine core, its workers, and everything else; who waits is answered."""
    fault = FAULTS[name]
    with traced_server(str(tiny_model), *TINY_FLAGS, "-tp", "2", *fault.flags) as (server, folder):
        traces = Traces(server, folder)
        calls = [BackgroundStream(server.url, "/v1/completions", **ENDLESS, stream=kind) for kind in (True, False)]
        calls[0].wait_for_events(3)
        wait_for(lambda: server.metric("num_requests_running") == 2, ANSWER_S, "two running requests")
        fault.do(server)
        if fault.status == 1:
            wait_for(lambda: status_of(server) in (503, None), ANSWER_S, "an unhealthy server")
        for call in calls:
            answer = call.result(ANSWER_S)
            told = answer.error is not None or answer.status >= 500
            assert told or (answer.broken and fault.status != 1)
        assert server.process.wait(ANSWER_S) == fault.status
        if fault.status == 1:
            assert "engine core 0" in server.log.splitlines()[-1]
            assert fault.words in server.log.splitlines()[-1]
        traces.check_gone()


def test_open_answers_finish_before_the_end(tiny_model: Path) -> None:
    """SIGTERM. Signals for the workers, such as a terminal's Ctrl-C for all processes, are not theirs to answer."""
    with traced_server(str(tiny_model), *TINY_FLAGS, "-tp", "2") as (server, folder):
        fields = {"prompt": "Once", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
        expected = server.text(**fields)
        traces = Traces(server, folder)
        open_one = BackgroundStream(server.url, "/v1/completions", **fields)
        open_one.wait_for_events(3)
        for number in (signal.SIGINT, signal.SIGTERM):
            for pid in server.worker_pids():
                os.kill(pid, number)
        server.process.send_signal(signal.SIGTERM)
        answer = open_one.result(60)
        assert answer.done
        assert answer.text() == expected
        assert server.process.wait(ANSWER_S) == 0
        assert server.log.splitlines()[-1].endswith("all requests are finished; stopped")
        traces.check_gone()
