"""Every process of a server killed, stopped or told to end, while it starts, rests and works, in three topologies.

Every open request gets an answer or the end of its connection, and either everything is gone, processes, port and
files, and the exit status tells why, or what was lost is there again and everybody else went on.

Every busy server loses its launcher, its engine core and an API server. Whatever else is handled the same way in each
topology, or at rest and at the start, comes in those where most could go wrong.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.conftest import TINY_FLAGS
from tests.support.faults import Load, Traces, traced_server
from tests.support.server import PATIENCE_S, Server, start_server, wait_for

pytestmark = pytest.mark.slow

RETURN_S = 2 * PATIENCE_S
"""How long what was lost may take to be there again."""
SHUTDOWN_TIMEOUT_S = 2


@dataclass(frozen=True)
class Topology:
    """How many processes of each kind."""

    api_servers: int
    engines: int

    def __str__(self) -> str:
        return f"{self.api_servers}x{self.engines}"

    def flags(self, model: Path) -> list[str]:
        counts = ["--api-server-count", str(self.api_servers), "-dp", str(self.engines), "--max-num-seqs", "2"]
        restarts = ["--max-engine-restarts", "10"] if self.engines > 1 else []
        return [str(model), *TINY_FLAGS, *counts, *restarts, "--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S)]

    def is_complete(self, server: Server) -> bool:
        """Every process is there, and nothing is missing in what the server says of its health."""
        pids = (server.api_server_pids(), server.engine_pids())
        if (len(pids[0]), len(pids[1])) != (self.api_servers, self.engines):
            return False
        health = server.http.get("/health")
        return health.status_code == 200 and not health.json().get("engines")


def kill_api_server(server: Server) -> None:
    os.kill(server.api_server_pids()[-1], signal.SIGKILL)


def stop_api_server(server: Server) -> None:
    os.kill(server.api_server_pids()[-1], signal.SIGSTOP)


def kill_engine(server: Server) -> None:
    os.kill(server.engine_pids()[-1], signal.SIGKILL)


def stop_engine(server: Server) -> None:
    os.kill(server.engine_pids()[-1], signal.SIGSTOP)


def kill_launcher(server: Server) -> None:
    os.kill(server.process.pid, signal.SIGKILL)


def terminate(server: Server) -> None:
    server.process.terminate()


def storm(server: Server) -> None:
    """Twenty times SIGTERM within a second."""
    for _ in range(20):
        server.process.terminate()
        time.sleep(0.05)


def interrupt_all(server: Server) -> None:
    """What Ctrl-C in a terminal does, and to those that a terminal would not reach."""
    for pid in (server.process.pid, *(process.pid for process in server.descendants())):
        with contextlib.suppress(ProcessLookupError):  # the launcher may have ended it by now
            os.kill(pid, signal.SIGINT)


Fault = Callable[[Server], None]


@dataclass(frozen=True)
class End:
    """How a server ends after a fault."""

    fault: Fault
    statuses: frozenset[int]
    told: bool = True
    """Every client gets an error, and not just the end of its connection."""


KILLED = End(kill_launcher, frozenset({-signal.SIGKILL}), told=False)
TERMINATED = End(terminate, frozenset({0}))
STORMED = End(storm, frozenset({0, 128 + signal.SIGTERM}))
INTERRUPTED = End(interrupt_all, frozenset({0}))
TERMINATED_EARLY = End(terminate, frozenset({128 + signal.SIGTERM}))
STORMED_EARLY = End(storm, frozenset({128 + signal.SIGTERM}))
INTERRUPTED_EARLY = End(interrupt_all, frozenset({128 + signal.SIGINT}))
LOST_ITS_ENGINE = End(kill_engine, frozenset({1}))
ITS_ENGINE_HUNG = End(stop_engine, frozenset({1}))

SINGLE, SCALED, DOUBLE = TOPOLOGIES = (Topology(1, 1), Topology(4, 1), Topology(2, 2))
ENDS_OF_BUSY = [
    *((topology, KILLED) for topology in TOPOLOGIES),
    *((topology, LOST_ITS_ENGINE) for topology in (SINGLE, SCALED)),
    *((topology, end) for topology in (SCALED, DOUBLE) for end in (TERMINATED, STORMED)),
    *((SINGLE, INTERRUPTED), (DOUBLE, INTERRUPTED), (SCALED, ITS_ENGINE_HUNG)),
]
ENDS_OF_IDLE = [
    (SINGLE, ITS_ENGINE_HUNG),
    (SCALED, LOST_ITS_ENGINE),
    (DOUBLE, KILLED),
    (DOUBLE, STORMED),
]
ENDS_OF_STARTS = [
    *((SINGLE, KILLED), (SINGLE, STORMED_EARLY), (SCALED, TERMINATED_EARLY), (SCALED, LOST_ITS_ENGINE)),
    *((DOUBLE, KILLED), (DOUBLE, LOST_ITS_ENGINE), (DOUBLE, INTERRUPTED_EARLY)),
]
LOSSES_OF_ANY = [(kill_api_server, True), (stop_api_server, True)]
LOSSES_OF_DOUBLE = [(kill_api_server, False), (kill_engine, False), (kill_engine, True), (stop_engine, True)]
LOSSES = [
    (topology, *loss)
    for topology in TOPOLOGIES
    for loss in (*LOSSES_OF_ANY, *(LOSSES_OF_DOUBLE if topology is DOUBLE else ()))
]


def name(value: object) -> str | None:
    """Of a parameter."""
    if isinstance(value, End):
        return value.fault.__name__
    if isinstance(value, bool):
        return "busy" if value else "idle"
    return str(value) if isinstance(value, Topology) else getattr(value, "__name__", None)


def end_it(server: Server, folder: Path, end: End) -> Traces:
    """Lets happen what ends the server, and looks for what is left. Returns what it had."""
    traces = Traces(server, folder)
    end.fault(server)
    assert server.process.wait(PATIENCE_S) in end.statuses
    traces.check_gone()
    return traces


@pytest.mark.parametrize(("topology", "end"), ENDS_OF_BUSY, ids=name)
def test_the_end_of_a_busy_server(tiny_model: Path, topology: Topology, end: End) -> None:
    with traced_server(*topology.flags(tiny_model)) as (server, folder):
        load = Load(server, topology.engines)
        end_it(server, folder, end)
        load.check_answered(end.told)


@pytest.mark.parametrize(("topology", "end"), ENDS_OF_IDLE, ids=name)
def test_the_end_of_an_idle_server(tiny_model: Path, topology: Topology, end: End) -> None:
    flags = topology.flags(tiny_model)
    with traced_server(*flags) as (server, folder):
        traces = end_it(server, folder, end)
        if end is KILLED:
            with start_server(*flags, port=traces.port) as restarted:
                assert restarted.text("a")


@pytest.mark.parametrize(("topology", "end"), ENDS_OF_STARTS, ids=name)
def test_the_end_of_a_start(tiny_model: Path, topology: Topology, end: End) -> None:
    """When the processes are there and the engine cores have not loaded yet."""
    with traced_server(*topology.flags(tiny_model), wait=False) as (server, folder):
        wait_for(lambda: has_all_processes(server, topology), PATIENCE_S, "all processes")
        end_it(server, folder, end)


def has_all_processes(server: Server, topology: Topology) -> bool:
    return (len(server.api_server_pids()), len(server.engine_pids())) == (topology.api_servers, topology.engines)


class Survivor:
    """A server that outlives what happens to it, one at a time: the topology of the last test that asked."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._topology: Topology | None = None
        self._stack = contextlib.ExitStack()

    def of(self, topology: Topology) -> Server:
        """First it loses an API server while it starts. At last it is told to end."""
        if topology is not self._topology:
            self.close()
            self._topology = topology
            self._server, folder = self._stack.enter_context(traced_server(*topology.flags(self._model), wait=False))
            wait_for(lambda: has_all_processes(self._server, topology), PATIENCE_S, "all processes")
            kill_api_server(self._server)
            self._server.wait_until_ready()
            self._stack.callback(lambda: end_it(self._server, folder, TERMINATED))
        return self._server

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="module")
def survivor(tiny_model: Path) -> Iterator[Survivor]:
    survivor = Survivor(tiny_model)
    yield survivor
    survivor.close()


@pytest.mark.parametrize(("topology", "fault", "is_busy"), LOSSES, ids=name)
def test_a_loss_that_is_made_up_for(survivor: Survivor, topology: Topology, fault: Fault, is_busy: bool) -> None:
    """Requests of the lost process end; those that it had no part in go on; what was lost comes back, and serves."""
    server = survivor.of(topology)
    of_engine = fault in (kill_engine, stop_engine)
    wait_for(lambda: topology.is_complete(server), RETURN_S, "server with all processes")
    load = Load(server, topology.engines) if is_busy else None
    number = (topology.engines if of_engine else topology.api_servers) - 1
    lost = (server.engine_pids() if of_engine else server.api_server_pids())[number]
    num_lost = 0
    if load is not None:
        num_lost = in_engines(server, engine=str(number)) if of_engine else load.of_api_servers(server)[number]
    fault(server)
    wait_for(lambda: lost not in (*server.engine_pids(), *server.api_server_pids()), PATIENCE_S, "end of what hangs")
    server.drop_connections()  # some may have been to what was lost
    if load is not None:
        check_load(server, load, num_lost, of_engine)
    wait_for(lambda: topology.is_complete(server), RETURN_S, "server with all processes")
    for _ in range(2 * topology.api_servers):
        server.drop_connections()
        assert server.text("a", max_tokens=4)
    server.check_idle()


def check_load(server: Server, load: Load, num_lost: int, told: bool) -> None:
    """As many requests as the lost process had are over, `told` by an error or by the end of the connection; the engine
    cores have nothing of them any more, and the other streams go on."""
    assert num_lost > 0
    wait_for(lambda: len(load.over()) >= num_lost, PATIENCE_S, "answers")
    over = load.over()
    assert len(over) == num_lost
    assert all(call.tells_an_error if told else not call.is_complete for call in over)
    num_open = len(load.calls) - num_lost
    wait_for(lambda: in_engines(server) == num_open, PATIENCE_S, "engine cores without what was lost")
    seen = {call: call.num_bytes for call in load.calls if call.is_alive() and call.num_bytes}
    wait_for(lambda: all(call.num_bytes > count for call, count in seen.items()), PATIENCE_S, "streams that go on")
    load.leave()


def in_engines(server: Server, **labels: str) -> int:
    """Requests that run or wait there."""
    return int(server.metric("num_requests_running", **labels) + server.metric("num_requests_waiting", **labels))
