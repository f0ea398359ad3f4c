"""SIGTERM and Ctrl-C: readiness off, open answers finish, then status 0."""

import json
import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import TINY_FLAGS
from tests.support.connections import ports_taken_by_each
from tests.support.held_thread import held_main_thread
from tests.support.server import PATIENCE_S, check_error, start_server, wait_for
from tests.support.streams import BackgroundStream

pytestmark = pytest.mark.slow

ENDLESS = {"prompt": "Once", "max_tokens": 60000, "ignore_eos": True}


REPEAT_S = 0.3
"""Signals within so short a time are one wish."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_open_answers_finish_and_new_work_is_refused(tiny_model: Path, number: signal.Signals) -> None:
    with start_server(str(tiny_model), *TINY_FLAGS, "-asc", "2", "--shutdown-timeout", "120") as server:
        fields = {"prompt": "Once", "max_tokens": 3000, "temperature": 0, "ignore_eos": True}
        alone = server.text(**fields)
        whole = BackgroundStream(server.url, "/v1/completions", **fields, stream=False)
        streams: list[BackgroundStream] = []
        while not all(ports_taken_by_each(server, (stream.stream.port for stream in streams))):
            streams.append(BackgroundStream(server.url, "/v1/completions", **fields))
            streams[-1].wait_for_events()
        with held_main_thread(server.engine_pids()[0]):  # it finishes nothing before all this has happened
            assert all(one.is_alive() for one in (whole, *streams))
            # Connections that are open already see the refusal.
            clients = [httpx.Client(base_url=server.url, trust_env=False, timeout=PATIENCE_S) for _ in range(4)]
            for client in clients:
                assert client.get("/health").status_code == 200
            server.process.send_signal(number)
            for client in clients:
                wait_for(lambda c=client: c.get("/health").status_code == 503, PATIENCE_S, "readiness off")  # type: ignore[misc]
            refused = clients[0].post("/v1/completions", json={"prompt": "a"})
            check_error(refused, 503)
            assert int(refused.headers["retry-after"]) >= 1
            for client in clients:
                client.close()
        for stream in streams:
            assert stream.result().text() == alone
            assert stream.stream.done
        assert json.loads(whole.result().body)["choices"][0]["text"] == alone
        assert server.process.wait(PATIENCE_S) == 0
        assert server.log.splitlines()[-1].endswith("all requests are finished; stopped")


def test_shutdown_timeout_cuts_off(tiny_model: Path) -> None:
    with start_server(str(tiny_model), *TINY_FLAGS, "--shutdown-timeout", "1") as server:
        streams = [
            BackgroundStream(server.url, "/v1/completions", **ENDLESS, stream=stream) for stream in (True, False)
        ]
        streams[0].wait_for_events()
        wait_for(lambda: server.metric("num_requests_running") == 2, PATIENCE_S, "two running requests")
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started >= 1
        streamed, whole = (stream.result() for stream in streams)
        assert streamed.error is not None
        assert streamed.error["code"] == "server_shutting_down"
        assert streamed.done
        assert whole.status == 503
        assert server.log.splitlines()[-1].endswith("stopped; requests cut off: 2")


def test_engine_that_dies_during_the_drain(tiny_model: Path) -> None:
    """Open streams hear of it at once, not when the time for them is over."""
    with start_server(str(tiny_model), *TINY_FLAGS, "--shutdown-timeout", "600") as server:
        stream = BackgroundStream(server.url, "/v1/completions", **ENDLESS)
        stream.wait_for_events()
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.http.get("/health").status_code == 503, PATIENCE_S, "readiness off")
        server.kill(server.engine_pids()[0])
        error = stream.result().error
        assert error is not None
        assert error["code"] == "engine_dead"
        assert stream.stream.done
        assert server.process.wait(PATIENCE_S) == 1
        assert server.log.splitlines()[-1].startswith("tokenmill: error: engine core 0 was killed (SIGKILL)")


def test_second_signal_ends_at_once(tiny_model: Path) -> None:
    with start_server(str(tiny_model), *TINY_FLAGS, "--shutdown-timeout", "600") as server:
        stream = BackgroundStream(server.url, "/v1/completions", **ENDLESS)
        stream.wait_for_events()
        # Two that come at the same moment are one wish.
        for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
            server.process.send_signal(number)
        wait_for(lambda: "so soon after the first it counts as the same" in server.log, PATIENCE_S, "both signals")
        time.sleep(1.1 * REPEAT_S)  # what comes sooner is the first one again
        assert server.process.poll() is None
        assert server.stop(signal.SIGTERM) == 128 + signal.SIGTERM
        result = stream.result()
        assert result.error is not None
        assert result.error["code"] == "server_shutting_down"
        assert result.done


def test_stop_while_loading(tiny_model: Path) -> None:
    with start_server(str(tiny_model), *TINY_FLAGS, wait=False) as server:
        wait_for(lambda: len(server.descendants()) >= 2, PATIENCE_S, "child processes")
        processes = server.descendants()
        assert server.stop() == 128 + signal.SIGTERM
        assert not any(process.is_running() for process in processes)


def test_ctrl_c_in_a_terminal(tiny_model: Path) -> None:
    """A terminal signals the whole foreground group; open answers still finish."""
    with start_server(str(tiny_model), *TINY_FLAGS, "--shutdown-timeout", "120") as server:
        stream = BackgroundStream(server.url, "/v1/completions", prompt="Once", max_tokens=3000, ignore_eos=True)
        stream.wait_for_events()
        (engine,) = server.engine_pids()
        with held_main_thread(engine):
            for pid in (server.process.pid, engine, *server.api_server_pids()):
                os.kill(pid, signal.SIGINT)
            wait_for(lambda: server.http.get("/health").status_code == 503, PATIENCE_S, "readiness off")
            assert stream.is_alive()
        assert stream.result().finish_reasons() == ["length"]
        assert server.process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("nohup", [False, True])
def test_end_of_the_terminal(tiny_model: Path, nohup: bool) -> None:
    """It ends the server, unless `nohup` says that it should not."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)  # children inherit the former
    try:
        with start_server(str(tiny_model), *TINY_FLAGS) as server:
            server.process.send_signal(signal.SIGHUP)
            if nohup:
                assert server.text("a")
                assert server.stop() == 0
            else:
                assert server.process.wait(PATIENCE_S) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
