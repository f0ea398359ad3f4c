"""Deaths whose every detail matters; `test_faults` has all the others."""

import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import TINY_FLAGS
from tests.support.faults import traced_server
from tests.support.processes import wait_for_ends
from tests.support.server import PATIENCE_S, Server, wait_for
from tests.support.streams import BackgroundStream

pytestmark = pytest.mark.slow

ENDLESS = {"prompt": "Once", "max_tokens": 50000, "ignore_eos": True}


def test_killed_engine_core(tiny_model: Path) -> None:
    """The only one. Four streams, four plain requests and four that wait: each gets an error, also new ones, health
    says no, and the server ends with a status and a line that tell."""
    with traced_server(str(tiny_model), *TINY_FLAGS, "-asc", "2", "--max-num-seqs", "8") as (
        server,
        folder,
    ):
        processes = server.descendants()
        calls = [
            BackgroundStream(server.url, "/v1/completions", **ENDLESS, stream=stream)
            for stream in (*[True] * 4, *[False] * 4, *[True] * 4)
        ]
        states = ("num_requests_running", "num_requests_waiting")
        wait_for(lambda: [server.metric(name) for name in states] == [8, 4], PATIENCE_S, "eight requests and four")
        server.kill(server.engine_pids()[0])
        wait_for(lambda: health(server) in (503, None), PATIENCE_S, "an unhealthy server")
        refused = try_to_complete(server)
        assert refused is None or refused.status_code >= 500
        for call in calls:
            stream = call.result()
            assert stream.error is not None or stream.status >= 500
            if stream.error is not None:
                assert stream.done
                assert "engine core 0" in stream.error["message"]
            else:
                assert "engine core 0" in json.loads(stream.body)["error"]["message"]
        assert server.process.wait(PATIENCE_S) == 1
        assert server.log.splitlines()[-1].startswith("tokenmill: error: engine core 0 was killed (SIGKILL)")
        wait_for_ends(processes)
        assert list(folder.iterdir()) == []


def health(server: Server) -> int | None:
    try:
        return server.http.get("/health").status_code
    except httpx.TransportError:
        return None


def try_to_complete(server: Server) -> httpx.Response | None:
    try:
        return server.post("/v1/completions", prompt="a", max_tokens=1)
    except httpx.TransportError:
        return None


def test_launcher_killed_before_the_configuration_is_known(tiny_model: Path) -> None:
    """Soon no process and no file is left."""
    with traced_server(str(tiny_model), *TINY_FLAGS, "-asc", "4", wait=False) as (server, folder):
        wait_for(server.descendants, PATIENCE_S, "the engine core's process")
        processes = server.descendants()
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        wait_for_ends(processes)
        wait_for(lambda: list(folder.iterdir()) == [], PATIENCE_S, "an empty folder for temporary files")


def test_stopped_processes_do_not_hold_up_the_end(tiny_model: Path) -> None:
    """An engine core that does not react (SIGSTOP) is ended all the same."""
    with traced_server(str(tiny_model), *TINY_FLAGS) as (server, folder):
        processes = server.descendants()
        os.kill(server.engine_pids()[0], signal.SIGSTOP)
        assert server.stop() == 0
        wait_for_ends(processes)
        assert list(folder.iterdir()) == []
