"""Signals to every process of a server at once, as systemd and others send them: the launcher alone answers."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.conftest import TINY_FLAGS
from tests.support.connections import ports_taken_by_each
from tests.support.faults import Traces, traced_server
from tests.support.held_thread import held_main_thread
from tests.support.ports import free_port
from tests.support.processes import wait_for_ends
from tests.support.server import PATIENCE_S, Server, start_server, wait_for
from tests.support.streams import BackgroundStream

pytestmark = pytest.mark.slow

REPEAT_S = 0.3
"""Signals within so short a time are one wish."""
NUM_TOKENS = 800
"""More than an engine core makes before it is held."""
TOPOLOGIES = [(), ("-asc", "2", "-dp", "2"), ("-tp", "2")]


def signal_all(server: Server, number: signal.Signals = signal.SIGTERM) -> None:
    """The launcher comes last: who answers by himself has done so before it can tell him anything."""
    for process in server.descendants():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    server.process.send_signal(number)


@contextlib.contextmanager
def streams_of_all(server: Server, max_tokens: int, *headless: Server) -> Iterator[list[BackgroundStream]]:
    """Open streams, of which each API server and each engine core has some, also those of `headless` launchers. Each
    engine core has begun to answer; in the block none works, so no answer ends there."""
    fields = {"prompt": "Once", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    streams: list[BackgroundStream] = []
    others = _ports_to(server)

    def open_one(rank: int) -> None:
        headers = {"X-data-parallel-rank": str(rank)}
        streams.append(BackgroundStream(server.url, "/v1/completions", headers, **fields))

    def taken_by_each() -> list[int]:
        return ports_taken_by_each(server, _ports_to(server) - others)

    with contextlib.ExitStack() as held:
        for rank, pid in enumerate(pid for launcher in (server, *headless) for pid in launcher.engine_pids()):
            open_one(rank)
            streams[-1].wait_for_events()
            held.enter_context(held_main_thread(pid))
        while not all(taken_by_each()):
            open_one(0)
            wait_for(lambda: sum(taken_by_each()) == len(streams), PATIENCE_S, "accepted connections")
        assert all(stream.is_alive() for stream in streams)
        yield streams


def _ports_to(server: Server) -> set[int]:
    """Our ends of the connections to it."""
    port = httpx.URL(server.url).port
    connections = psutil.Process().net_connections("tcp")
    return {each.laddr.port for each in connections if each.raddr and each.raddr.port == port}


@pytest.mark.parametrize("flags", TOPOLOGIES, ids=" ".join)
def test_open_answers_finish(tiny_model: Path, flags: tuple[str, ...]) -> None:
    with traced_server(str(tiny_model), *TINY_FLAGS, *flags, "--shutdown-timeout", "120") as (server, folder):
        expected = server.text("Once", max_tokens=NUM_TOKENS, ignore_eos=True)
        traces = Traces(server, folder)
        with streams_of_all(server, NUM_TOKENS) as streams:
            signal_all(server)
            wait_for(lambda: server.http.get("/health").status_code == 503, PATIENCE_S, "readiness off")
        for stream in streams:
            answer = stream.result()
            assert answer.done
            assert answer.finish_reasons() == ["length"]
            assert answer.text() == expected
        assert server.process.wait(PATIENCE_S) == 0
        assert "all requests are finished; stopped" in server.log
        traces.check_gone()


def test_open_answers_of_other_launchers_finish(tiny_model: Path) -> None:
    """The head's processes are told to end, all at once; the headless launcher hears of the end from the head."""
    flags = (str(tiny_model), *TINY_FLAGS, "-dp", "2", "-dpl", "1", "--data-parallel-rpc-port", str(free_port()))
    with (
        start_server(*flags, "--shutdown-timeout", "120", wait=False) as head,
        start_server(*flags, "--headless", "-dpr", "1", wait=False) as launcher,
    ):
        head.wait_until_ready()
        processes = [*head.descendants(), *launcher.descendants()]
        with streams_of_all(head, NUM_TOKENS, launcher) as streams:
            signal_all(head)
            wait_for(lambda: head.http.get("/health").status_code == 503, PATIENCE_S, "readiness off")
        assert [stream.result().finish_reasons() for stream in streams] == [["length"]] * len(streams)
        assert head.process.wait(PATIENCE_S) == 0
        assert launcher.process.wait(PATIENCE_S) == 0
        wait_for_ends(processes)


@pytest.mark.parametrize("flags", TOPOLOGIES, ids=" ".join)
def test_the_second_time_everything_ends_at_once(tiny_model: Path, flags: tuple[str, ...]) -> None:
    with traced_server(str(tiny_model), *TINY_FLAGS, *flags, "--shutdown-timeout", "600") as (server, folder):
        traces = Traces(server, folder)
        with streams_of_all(server, 60000) as streams:
            signal_all(server)
            wait_for(lambda: "again to stop at once" in server.log, PATIENCE_S, "drain")
        time.sleep(1.1 * REPEAT_S)  # what comes sooner is the first one again
        assert server.process.poll() is None
        signal_all(server)
        for stream in streams:
            error = stream.result().error
            assert error is not None
            assert error["code"] == "server_shutting_down"
        assert server.process.wait(PATIENCE_S) == 128 + signal.SIGTERM
        traces.check_gone()


def test_children_are_deaf_from_the_moment_they_exist(tiny_model: Path) -> None:
    """The launcher alone gets no signal here, and serves."""
    flags = (str(tiny_model), *TINY_FLAGS, "-tp", "2", "-asc", "2")
    signalled: set[int] = set()
    with traced_server(*flags, wait=False) as (server, folder):
        while "is ready at" not in server.log and server.process.poll() is None:
            for process in server.descendants():
                if process.pid not in signalled:
                    signalled.add(process.pid)
                    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                        os.kill(process.pid, number)
        server.wait_until_ready()
        assert {*server.engine_pids(), *server.worker_pids(), *server.api_server_pids()} <= signalled
        assert "starting another" not in server.log
        assert server.text("a")
        traces = Traces(server, folder)
        assert server.stop() == 0
        traces.check_gone()


def test_a_start_ends_at_once(tiny_model: Path) -> None:
    with traced_server(str(tiny_model), *TINY_FLAGS, "-tp", "2", wait=False) as (server, folder):
        wait_for(server.descendants, PATIENCE_S, "child process")
        traces = Traces(server, folder)
        signal_all(server)
        assert server.process.wait(PATIENCE_S) == 128 + signal.SIGTERM
        traces.check_gone()
