"""A headless launcher that is told to stop: what runs on its ranks finishes first, nobody sends them anything new."""

import contextlib
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.test_data_parallel import Deployment, ask, endless, finished, health, pinned, wait_for_return
from tests.support.held_thread import held_main_thread
from tests.support.processes import wait_for_ends
from tests.support.server import PATIENCE_S, Server, check_error, wait_for
from tests.support.streams import BackgroundStream

pytestmark = pytest.mark.slow

NUM_TOKENS = 800
"""More than an engine core makes before it is held."""
FIELDS = {"prompt": "Once", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
RANK_1 = ("-dpl", "1", "-dpr", "1")


def signal_all(launcher: Server) -> None:
    """As systemd does; the launcher comes last."""
    for process in [*launcher.descendants(), psutil.Process(launcher.process.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)


def faults(head: Server) -> list[tuple[int, str]]:
    """As one of the API servers sees it."""
    head.drop_connections()
    engines = head.http.get("/health").json().get("engines", [])
    return [(fault["engine"], fault["status"]) for fault in engines]


def wait_for_fault(head: Server, status: str) -> None:
    wait_for(lambda: faults(head) == [(1, status)], PATIENCE_S, f"rank 1 {status}")


def errors(head: Server) -> float:
    return head.metric("request_success_total", engine="1", finished_reason="error")


def test_what_runs_finishes_and_nothing_new_comes(tiny_model: Path) -> None:
    """Also if all processes get the signal at once. The launcher that is to follow waits for the end of this one; what
    has no more time when that one is told to stop gets an error."""
    deployment = Deployment(tiny_model, "-dp", "2")
    with deployment.head("-dpl", "1") as head:
        with deployment.headless(*RANK_1, "--shutdown-timeout", "600") as first:
            head.wait_until_ready()
            expected = head.text(**FIELDS)
            finished_before = finished(head, 1)
            processes = first.descendants()
            streams = [
                BackgroundStream(head.url, "/v1/completions", {"X-data-parallel-rank": "1"}, **FIELDS) for _ in range(4)
            ]
            for stream in streams:
                stream.wait_for_events()
            with held_main_thread(first.engine_pids()[0]):
                signal_all(first)
                wait_for_fault(head, "draining")
                assert health(head) == 200
                assert "told to stop" in check_error(ask(head, 1), 503)["message"]
                for _ in range(4):
                    assert head.text("a", max_tokens=2)
                assert all(stream.is_alive() for stream in streams)
            for stream in streams:
                answer = stream.result()
                assert (answer.text(), answer.finish_reasons()) == (expected, ["length"])
            assert first.process.wait(PATIENCE_S) == 0
            assert "all requests on rank 1 are finished; stopped" in first.log.splitlines()[-1]
            wait_for_ends(processes)
        wait_for_fault(head, "missing")
        assert (finished(head, 1) - finished_before, errors(head)) == (4, 0)
        assert head.metric("engine_up", engine="1") == 0
        assert "requests are lost" not in head.log
        with deployment.headless(*RANK_1, "--shutdown-timeout", "0.1") as second:
            wait_for_return(head, 1)
            lost, kept = endless(head, 1), endless(head, 0)
            for stream in (lost, kept):
                stream.wait_for_events()
            second.process.send_signal(signal.SIGINT)
            assert second.process.wait(PATIENCE_S) == 0
            error = lost.result().error
            assert error is not None
            assert error["code"] == "engine_dead"
        assert kept.is_alive()
        assert errors(head) == 1
        assert pinned(head, 0)
