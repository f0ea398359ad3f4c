"""What /health and clients of a real API server see of engine cores that are lost, come back, or stall."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.api_server import MODEL_NAME, Server, run_server
from tests.support.echo_engine import EchoEngine
from tests.support.server import PATIENCE_S, wait_for
from tests.support.sse import is_error
from tokenmill_engine.ipc.control import (
    EngineBack,
    EngineLost,
    EngineRecovered,
    EnginesReady,
    EngineStalled,
    FromApiServer,
    Ping,
    Pulse,
    Serving,
    ToApiServer,
)

pytestmark = pytest.mark.slow

PATH = "/v1/completions"
SHORT = {"model": MODEL_NAME, "prompt": "one two three", "max_tokens": 3, "temperature": 0}
LONG = SHORT | {"max_tokens": 8000}
KILLED = "engine core 1 was killed (SIGKILL)"


def wait_until(condition: Callable[[], bool]) -> None:
    wait_for(condition, PATIENCE_S, "such state", poll_s=0.01)


def tell(server: Server, message: ToApiServer) -> None:
    server.children[0].channel.send(message)


def hear(server: Server) -> FromApiServer:
    return server.children[0].channel.receive()


def health(client: httpx.Client) -> tuple[int, dict[str, Any]]:
    response = client.get("/health")
    return response.status_code, response.json()


def pinned(client: httpx.Client, rank: int, body: dict[str, Any] = SHORT) -> httpx.Response:
    return client.post(PATH, json=body, headers={"X-data-parallel-rank": str(rank)})


def restart(server: Server, engine: int) -> EchoEngine:
    """Another incarnation of an engine that was stopped."""
    old = server.engines[engine]
    server.engines[engine] = EchoEngine(old.run_dir, engine, incarnation=old.incarnation + 1).start()
    return server.engines[engine]


def test_one_of_two_engines_is_lost_and_comes_back() -> None:
    with (
        run_server(2, engine_options={"step_s": 0.01}) as server,
        server.client() as client,
        ThreadPoolExecutor() as pool,
    ):
        open_calls = [pool.submit(pinned, client, rank, LONG | {"max_tokens": 300}) for rank in (0, 1)]
        wait_until(lambda: all(engine.num_running == 1 for engine in server.engines))
        server.engines[1].stop()
        tell(server, EngineLost(1, 0, KILLED, restarts=True))
        failed = open_calls[1].result(PATIENCE_S)
        assert is_error(failed, 500, code="engine_dead")
        assert failed.json()["error"]["message"] == KILLED
        missing = {"engine": 1, "status": "restarting", "reason": KILLED}
        assert health(client) == (200, {"status": "ok", "engines": [missing]})
        refused = pinned(client, 1)
        assert is_error(refused, 503, code="engine_unavailable")
        assert refused.headers["retry-after"] == "1"
        served = len(server.engines[0].added)
        assert [client.post(PATH, json=SHORT).status_code for _ in range(6)] == [200] * 6
        assert len(server.engines[0].added) == served + 6
        assert open_calls[0].result(PATIENCE_S).json()["choices"][0]["finish_reason"] == "length"

        again = restart(server, 1)
        tell(server, EngineBack(again.ready()))
        wait_until(lambda: health(client) == (200, {"status": "ok"}))
        assert pinned(client, 1).status_code == 200
        assert [client.post(PATH, json=SHORT).status_code for _ in range(6)] == [200] * 6
        assert len(again.added) >= 3


@pytest.mark.parametrize("launcher_may_come", [False, True])
def test_an_engine_that_nobody_starts_again_is_not_worth_another_attempt(launcher_may_come: bool) -> None:
    """Until it is there all the same; what was said of its predecessor does not count any more."""
    status = "missing" if launcher_may_come else "dead"
    with run_server(2) as server, server.client() as client:
        server.engines[1].stop()
        tell(server, EngineLost(1, 0, KILLED, may_return=launcher_may_come))
        fault = {"engine": 1, "status": status, "reason": KILLED}
        wait_until(lambda: health(client) == (200, {"status": "ok", "engines": [fault]}))
        refused = pinned(client, 1)
        assert is_error(refused, 503, code="engine_unavailable")
        assert "retry-after" not in refused.headers
        assert refused.headers["x-should-retry"] == "false"
        assert client.post(PATH, json=SHORT).status_code == 200

        tell(server, EngineBack(restart(server, 1).ready()))
        wait_until(lambda: health(client) == (200, {"status": "ok"}))
        assert pinned(client, 1).status_code == 200
        server.engines[1].stop()
        tell(server, EngineLost(1, 1, KILLED, restarts=True))
        wait_until(lambda: health(client)[1].get("engines") == [fault | {"status": "restarting"}])
        assert pinned(client, 1).headers["retry-after"] == "1"
        server.engines[1].start()


def test_an_engine_that_is_lost_while_nobody_is_connected_to_its_successor_yet() -> None:
    """Whichever message is handled first, the API server does not wait for who is gone."""
    with run_server(2) as server, server.client() as client:
        server.engines[1].stop()
        tell(server, EngineLost(1, 0, KILLED, restarts=True))
        gone = restart(server, 1)
        gone.stop()
        tell(server, EngineBack(gone.ready()))
        tell(server, EngineLost(1, 1, KILLED, restarts=True))
        again = restart(server, 1)
        tell(server, EngineBack(again.ready()))
        wait_until(lambda: health(client) == (200, {"status": "ok"}))
        assert pinned(client, 1).status_code == 200


def test_all_engines_are_lost_but_one_restarts() -> None:
    with run_server(2) as server, server.client() as client:
        for engine in server.engines:
            engine.stop()
        tell(server, EngineLost(0, 0, "engine core 0 exited with status 1"))
        tell(server, EngineLost(1, 0, KILLED, restarts=True))
        wait_until(lambda: health(client)[0] == 503)
        status, body = health(client)
        assert (status, body["status"], body["reason"]) == (503, "starting", f"{KILLED}; it is being restarted")
        assert [(engine["engine"], engine["status"]) for engine in body["engines"]] == [(0, "dead"), (1, "restarting")]
        for response in (client.post(PATH, json=SHORT), pinned(client, 0)):
            assert is_error(response, 503, code="engine_starting")
        tell(server, EngineBack(restart(server, 1).ready()))
        wait_until(lambda: health(client)[0] == 200)
        assert client.post(PATH, json=SHORT).status_code == 200
        assert is_error(pinned(client, 0), 503, code="engine_unavailable")
        server.engines[1].stop()
        tell(server, EngineLost(1, 1, KILLED))
        wait_until(lambda: health(client)[1]["status"] == "dead")
        assert is_error(client.post(PATH, json=SHORT), 500, code="engine_dead")
        for engine in server.engines:
            engine.start()


def test_an_api_server_that_starts_while_an_engine_is_lost() -> None:
    with run_server(2, ready=False) as server, server.client() as client:
        stalled = EngineStalled(0, 0, time.time() - 70)
        lost = EngineLost(1, 4, KILLED, restarts=True)
        tell(server, EnginesReady([server.engines[0].ready()], [lost], [stalled]))
        assert hear(server) == Serving()
        status, body = health(client)
        assert (status, body["status"]) == (503, "stalled")
        assert [engine["status"] for engine in body["engines"]] == ["stalled", "restarting"]
        tell(server, EngineRecovered(0, 0))
        wait_until(lambda: health(client)[0] == 200)
        assert client.post(PATH, json=SHORT).status_code == 200


def test_stalled_engines() -> None:
    """One gets no requests; if all are, they get them, and /health says no."""
    with run_server(2) as server, server.client() as client:
        tell(server, EngineStalled(0, 0, time.time() - 6100))
        wait_until(lambda: "engines" in health(client)[1])
        status, body = health(client)
        assert (status, body["status"]) == (200, "ok")
        ((trouble),) = body["engines"]
        assert (trouble["engine"], trouble["status"]) == (0, "stalled")
        assert trouble["reason"].startswith("it has work but finished no step for 6")
        assert [client.post(PATH, json=SHORT).status_code for _ in range(6)] == [200] * 6
        assert len(server.engines[0].added) == 0
        assert pinned(client, 0).status_code == 200

        tell(server, EngineStalled(1, 0, time.time() - 6100))
        wait_until(lambda: health(client)[0] == 503)
        assert health(client)[1]["status"] == "stalled"
        assert health(client)[1]["reason"] == "no engine core gets its work done"
        assert client.post(PATH, json=SHORT).status_code == 200

        tell(server, EngineRecovered(0, 0))
        wait_until(lambda: health(client)[0] == 200)
        before = len(server.engines[1].added)
        assert [client.post(PATH, json=SHORT).status_code for _ in range(4)] == [200] * 4
        assert len(server.engines[1].added) == before


def test_an_api_server_answers_pings_also_before_it_serves() -> None:
    with run_server(ready=False) as server:
        tell(server, Ping())
        assert hear(server) == Pulse()
        server.announce_engines()
        tell(server, Ping())
        assert hear(server) == Pulse()
