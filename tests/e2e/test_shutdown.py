"""SIGTERM and Ctrl-C: readiness off, open answers finish, then status 0."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import TINY_FLAGS
from tests.support.faults import wait_for_end
from tests.support.held_thread import held_main_thread
from tests.support.server import PATIENCE_S, Server, check_error, start_server, wait_for
from tests.support.streams import BackgroundStream

pytestmark = pytest.mark.slow

ENDLESS = {"prompt": "Once", "max_tokens": 60000, "ignore_eos": True}


REPEAT_S = 1.0
"""Signals within so short a time are one wish."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_open_answers_finish_and_new_work_is_refused(tiny_model: Path, number: signal.Signals) -> None:
    with start_server(str(tiny_model), *TINY_FLAGS, "-asc", "2") as server:
        fields = {"prompt": "Once", "max_tokens": 3000, "temperature": 0, "ignore_eos": True}
        alone = server.text(**fields)
        # Connections that are open already, one per API server at least, see the refusal.
        clients = [httpx.Client(base_url=server.url, trust_env=False, timeout=PATIENCE_S) for _ in range(4)]
        for client in clients:
            assert client.get("/health").status_code == 200
        streams = [BackgroundStream(server.url, "/v1/completions", **fields, stream=stream) for stream in (True, False)]
        wait_for(lambda: server.metric("num_requests_running") == 2, PATIENCE_S, "two running requests", poll_s=0.001)
        with held_main_thread(server.engine_pids()[0]):  # they are not finished before all this has happened
            server.process.send_signal(number)
            for client in clients:
                wait_for(lambda c=client: c.get("/health").status_code == 503, PATIENCE_S, "readiness off")  # type: ignore[misc]
            refused = clients[0].post("/v1/completions", json={"prompt": "a"})
            check_error(refused, 503)
            assert int(refused.headers["retry-after"]) >= 1
            for client in clients:
                client.close()
            assert all(stream.is_alive() for stream in streams)
        assert streams[0].result().text() == alone
        assert streams[0].stream.done
        assert json.loads(streams[1].result().body)["choices"][0]["text"] == alone
        assert server.process.wait(PATIENCE_S) == 0
        assert server.log.splitlines()[-1].endswith("all requests are finished; stopped")


def test_shutdown_timeout_cuts_off(tiny_model: Path) -> None:
    with start_server(str(tiny_model), *TINY_FLAGS, "--shutdown-timeout", "1") as server:
        streams = [
            BackgroundStream(server.url, "/v1/completions", **ENDLESS, stream=stream) for stream in (True, False)
        ]
        streams[0].wait_for_events()
        wait_for(lambda: server.metric("num_requests_running") == 2, 20, "two running requests")
        started = time.monotonic()
        assert server.stop() == 0
        assert 1 <= time.monotonic() - started < 5
        streamed, whole = (stream.result(5) for stream in streams)
        assert streamed.error is not None
        assert streamed.error["code"] == "server_shutting_down"
        assert streamed.done
        assert whole.status == 503
        assert server.log.splitlines()[-1].endswith("stopped; requests cut off: 2")


def test_engine_that_dies_during_the_drain(tiny_model: Path) -> None:
    """Open streams hear of it at once, not when the time for them is over."""
    with start_server(str(tiny_model), *TINY_FLAGS, "--shutdown-timeout", "60") as server:
        stream = BackgroundStream(server.url, "/v1/completions", **ENDLESS)
        stream.wait_for_events()
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.http.get("/health").status_code == 503, 5, "readiness off")
        server.kill(server.engine_pids()[0])
        error = stream.result(5).error
        assert error is not None
        assert error["code"] == "engine_dead"
        assert stream.stream.done
        assert server.process.wait(10) == 1
        assert server.log.splitlines()[-1].startswith("tokenmill: error: engine core 0 was killed (SIGKILL)")


def test_second_signal_ends_at_once(tiny_model: Path) -> None:
    with start_server(str(tiny_model), *TINY_FLAGS) as server:
        stream = BackgroundStream(server.url, "/v1/completions", **ENDLESS)
        stream.wait_for_events()
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)  # at once: part of the first
        wait_for(lambda: "again to stop at once" in server.log, 5, "the first signal's notice")
        time.sleep(0.5)  # what comes sooner is the first one again
        assert server.process.poll() is None
        started = time.monotonic()
        assert server.stop(signal.SIGTERM) == 128 + signal.SIGTERM
        assert time.monotonic() - started < 3
        result = stream.result(5)
        assert result.error is not None
        assert result.error["code"] == "server_shutting_down"
        assert result.done


def test_stop_while_loading(tiny_model: Path) -> None:
    with start_server(str(tiny_model), *TINY_FLAGS, wait=False) as server:
        wait_for(lambda: len(server.descendants()) == 2, 30, "child processes")
        processes = server.descendants()
        assert server.stop() == 128 + signal.SIGTERM
        assert not any(process.is_running() for process in processes)


def test_ctrl_c_in_a_terminal(tiny_model: Path) -> None:
    """A terminal signals the whole foreground group; open answers still finish."""
    with start_server(str(tiny_model), *TINY_FLAGS) as server:
        fields = {"prompt": "Once", "max_tokens": tokens_in(server, seconds=2), "ignore_eos": True}
        stream = BackgroundStream(server.url, "/v1/completions", **fields)
        stream.wait_for_events()
        for pid in (server.process.pid, *server.engine_pids(), *server.api_server_pids()):
            os.kill(pid, signal.SIGINT)
        assert stream.result(30).finish_reasons() == ["length"]
        assert server.process.wait(10) == 0


@pytest.mark.parametrize("nohup", [False, True])
def test_end_of_the_terminal(tiny_model: Path, nohup: bool) -> None:
    """It ends the server, unless `nohup` says that it should not."""
    if nohup:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # children inherit it
    try:
        with start_server(str(tiny_model), *TINY_FLAGS) as server:
            server.process.send_signal(signal.SIGHUP)
            if nohup:
                assert server.text("a")
                assert server.stop() == 0
            else:
                assert server.process.wait(10) == 0
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
