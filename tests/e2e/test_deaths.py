"""Any process killed at any time: everybody gets an answer, nothing stays behind."""

import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.conftest import TINY_FLAGS
from tests.support.server import Server, start_server, wait_for
from tests.support.streams import BackgroundStream

pytestmark = pytest.mark.slow

ENDLESS = {"prompt": "Once", "max_tokens": 50000, "ignore_eos": True}


@contextlib.contextmanager
def traced_server(*arguments: str, wait: bool = True, port: int = 0) -> Iterator[tuple[Server, Path]]:
    """A server and the folder for its temporary files."""
    with (
        tempfile.TemporaryDirectory(prefix="tm-") as folder,
        start_server(*arguments, env={"TMPDIR": folder}, wait=wait, port=port) as server,
    ):
        yield server, Path(folder)


def wait_for_end(processes: list[psutil.Process], timeout_s: float) -> None:
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    assert alive == [], f"still there after {timeout_s} s: {[process.cmdline() for process in alive]}"


def test_killed_engine_core(tiny_model: Path) -> None:
    """The only one. Four streams, four plain requests and four that wait: each gets an error within 5 s, new ones at
    once, health says no, and the server ends with a status and a line that tell."""
    with traced_server(str(tiny_model), *TINY_FLAGS, "-asc", "2", "--max-num-seqs", "8") as (
        server,
        folder,
    ):
        processes = server.descendants()
        calls = [
            BackgroundStream(server.url, "/v1/completions", **ENDLESS, stream=stream)
            for stream in (*[True] * 4, *[False] * 4, *[True] * 4)
        ]
        wait_for(lambda: server.metric("num_requests_running") == 8, 20, "eight running requests")
        killed_at = time.monotonic()
        server.kill(server.engine_pids()[0])
        wait_for(lambda: health(server) in (503, None), 5, "an unhealthy server")
        refused = try_to_complete(server)
        assert refused is None or refused.status_code >= 500
        for call in calls:
            stream = call.result(5)
            assert call.ended_at - killed_at < 5
            assert stream.error is not None or stream.status >= 500
            if stream.error is not None:
                assert stream.done
                assert "engine core 0" in stream.error["message"]
            else:
                assert "engine core 0" in json.loads(stream.body)["error"]["message"]
        assert server.process.wait(10) == 1
        assert server.log.splitlines()[-1].startswith("tokenmill: error: engine core 0 was killed (SIGKILL)")
        wait_for_end(processes, 1)
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


@pytest.mark.parametrize("moment", ["spawned", "loading", "idle", "busy"])
def test_killed_launcher(tiny_model: Path, moment: str) -> None:
    """Within 10 s no process and no file is left, and a restart on the same port serves."""
    arguments = (str(tiny_model), *TINY_FLAGS, "-asc", "4")
    with traced_server(*arguments, wait=moment in ("idle", "busy")) as (server, folder):
        if moment == "spawned":
            wait_for(server.descendants, 30, "the engine core's process")
        if moment == "loading":
            wait_for(lambda: len(server.descendants()) == 5, 30, "five child processes")
        if moment == "busy":
            streams = [BackgroundStream(server.url, "/v1/completions", **ENDLESS) for _ in range(8)]
            for stream in streams:
                stream.wait_for_events(3)
        processes = server.descendants()
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        wait_for_end(processes, 10)
        wait_for(lambda: list(folder.iterdir()) == [], 1, "an empty folder for temporary files")
        if moment == "idle":
            port = httpx.URL(server.url).port
            assert port is not None
            with start_server(*arguments, port=port) as restarted:
                assert restarted.text("a")


@pytest.mark.parametrize("moment", ["loading", "idle", "busy"])
def test_killed_api_server(tiny_model: Path, moment: str) -> None:
    """Its own requests break off, the others go on; another takes its place and its engine work ends."""
    with traced_server(str(tiny_model), *TINY_FLAGS, "-asc", "4", wait=moment != "loading") as (server, _):
        if moment == "loading":
            wait_for(lambda: len(server.api_server_pids()) == 4, 30, "four API servers")
        streams = []
        if moment == "busy":
            streams = [BackgroundStream(server.url, "/v1/completions", **ENDLESS) for _ in range(8)]
            for stream in streams:
                stream.wait_for_events(3)
        victim = server.api_server_pids()[1]
        server.kill(victim)
        wait_for(lambda: "starting another" in server.log, 5, "a replacement")
        server.wait_until_ready()
        if moment == "busy":
            wait_for(lambda: sum(stream.stream.broken for stream in streams) == 2, 5, "two broken streams")
            wait_for(lambda: server.metric("num_requests_running") == 6, 5, "six running requests")
        wait_for(lambda: len(server.api_server_pids()) == 4, 30, "four API servers")
        assert victim not in server.api_server_pids()
        for _ in range(8):
            assert server.text("a")
        assert server.stop(signal.SIGTERM, 45) == 0 if moment != "busy" else True


def test_stopped_processes_do_not_hold_up_the_end(tiny_model: Path) -> None:
    """An engine core that does not react (SIGSTOP) is ended all the same."""
    with traced_server(str(tiny_model), *TINY_FLAGS) as (server, folder):
        processes = server.descendants()
        os.kill(server.engine_pids()[0], signal.SIGSTOP)
        assert server.stop() == 0
        wait_for_end(processes, 1)
        assert list(folder.iterdir()) == []
