"""Workers that die again and again leave nothing in the processes that stay: no descriptor, no thread, no file."""

import os
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import TINY_FLAGS
from tests.support.faults import Traces, traced_server
from tests.support.server import Server, wait_for

pytestmark = pytest.mark.slow

DEADLINE_S = 120.0


def kill_a_worker(server: Server, rank: int) -> None:
    """Returns when the engine core serves again, with new workers."""
    engine, workers = server.engine_pids(), server.worker_pids()
    processes = [psutil.Process(pid) for pid in (*engine, *workers)]
    server.kill(workers[rank])
    assert psutil.wait_procs(processes, timeout=DEADLINE_S)[1] == []
    wait_for(lambda: server.http.get("/health").status_code == 200, DEADLINE_S, "a healthy server", poll_s=0.2)
    wait_for(lambda: len(server.worker_pids()) == len(workers), DEADLINE_S, "new workers")
    assert not set(workers) & set(server.worker_pids())


def holdings(server: Server) -> list[tuple[int, int]]:
    """Descriptors and threads of the launcher and the API server."""
    processes = [psutil.Process(pid) for pid in (server.process.pid, *server.api_server_pids())]
    return [(process.num_fds(), process.num_threads()) for process in processes]


def test_deaths_of_workers_add_up_to_nothing(tiny_model: Path) -> None:
    flags = ("-tp", "2", "--max-engine-restarts", "20")
    with traced_server(str(tiny_model), *TINY_FLAGS, *flags) as (server, folder):
        kill_a_worker(server, 0)
        expected = server.text()
        server.drop_connections()
        before = holdings(server)
        for rank in (1, 0):
            kill_a_worker(server, rank)
            assert server.text() == expected
        server.drop_connections()
        wait_for(lambda: holdings(server) == before, DEADLINE_S, f"as little as before: {before}")
        (run_dir,) = folder.iterdir()
        assert not [name for name in os.listdir(run_dir) if name.startswith("workers")]
        traces = Traces(server, folder)
        assert server.stop() == 0
        traces.check_gone()
