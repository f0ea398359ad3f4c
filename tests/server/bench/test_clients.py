"""The load in one process and in several: the same requests, the same limits, one common start."""

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence

import psutil
import pytest
import uvloop

from tests.support.scripted_server import DONE, Reply, Script, ScriptedServer, Seen, text_event
from tests.support.server import wait_for
from tokenmill_engine.errors import TokenmillError
from tokenmill_server.bench import clients
from tokenmill_server.bench.client_process import Target
from tokenmill_server.bench.clients import Run, default_processes, run_load
from tokenmill_server.bench.http_client import HttpClient
from tokenmill_server.bench.load import Job, send_all

Start = Callable[[Script], ScriptedServer]


def jobs(names: Sequence[str], offsets_s: Sequence[float] | None = None) -> list[Job]:
    times_s = offsets_s or [0.0] * len(names)
    bodies = [json.dumps({"prompt": name}).encode() for name in names]
    return [Job(body, 5, 1, at_s) for body, at_s in zip(bodies, times_s, strict=True)]


def echo(delay_s: float) -> Script:
    """Answers with the prompt."""
    return lambda seen, index: Reply([(delay_s, text_event(seen.body["prompt"], "length")), (0, DONE)])


def load(server: ScriptedServer, count: int, processes: int, limit: int | None, **more: list[Job]) -> tuple[Run, int]:
    """The run and the number of responses that were reported while it went on."""
    target = Target(server.url, {"X-Team": "a"}, "/v1/completions", limit)
    names = [f"p{index}" for index in range(count)]
    reported: list[int] = []
    run = run_load(target, more.get("warmups", []), more.get("jobs") or jobs(names), processes, reported.append)
    return run, sum(reported)


@pytest.mark.parametrize("processes", [1, 3])
def test_every_job_is_sent_once_within_the_limit(scripted_server: Start, processes: int) -> None:
    def reply(seen: Seen, index: int) -> Reply:
        return Reply([server.once_open(7), *echo(0.05)(seen, index).pieces])

    server = scripted_server(reply)
    started = time.perf_counter()
    run, num_reported = load(server, 20, processes, limit=7)
    assert [record.text for record in run.records] == [f"p{index}" for index in range(20)]
    assert [record.error for record in run.records] == [None] * 20
    assert sorted(seen.body["prompt"] for seen in server.seen) == sorted(f"p{index}" for index in range(20))
    assert server.max_open == 7
    assert 3 * 0.05 <= run.duration_s <= time.perf_counter() - started
    assert num_reported <= 20
    assert {seen.headers["x-team"] for seen in server.seen} == {"a"}


def test_nothing_is_sent_before_its_time(scripted_server: Start) -> None:
    """Not by the fraction of a millisecond that the timers of the loop do not count either."""
    server = scripted_server(echo(0.0))
    offsets_s = [0.0034 * index for index in range(20)]

    async def lateness_s() -> list[float]:
        client = HttpClient(server.url, {})
        start_s = time.perf_counter()
        names = [f"p{index}" for index in range(20)]
        records = await send_all(client, "/v1/completions", jobs(names, offsets_s), None, start_s, lambda: None)
        client.close()
        return [record.start_s - start_s - offset_s for record, offset_s in zip(records, offsets_s, strict=True)]

    assert min(uvloop.run(lateness_s())) >= 0


@pytest.mark.parametrize("processes", [1, 2])
def test_the_warm_up_is_over_before_anything_is_measured(scripted_server: Start, processes: int) -> None:
    server = scripted_server(echo(0.02))
    run, _ = load(server, 6, processes, None, warmups=jobs(["w0", "w1", "w2", "w3", "w4"]))
    assert [seen.body["prompt"][0] for seen in server.seen] == ["w"] * 5 + ["p"] * 6
    assert max(seen.finished_s for seen in server.seen[:5]) <= min(seen.arrived_s for seen in server.seen[5:])
    assert len(run.records) == 6


@pytest.mark.parametrize("processes", [1, 2])
def test_jobs_leave_at_their_times_from_a_common_start(scripted_server: Start, processes: int) -> None:
    server = scripted_server(echo(0.0))
    offsets_s = [0.0, 0.1, 0.2, 0.3]
    run, _ = load(server, 4, processes, None, jobs=jobs(["a", "b", "c", "d"], offsets_s))
    assert [record.text for record in run.records] == ["a", "b", "c", "d"]
    start_s = max(record.end_s for record in run.records) - run.duration_s  # or a moment earlier
    for record, offset_s in zip(run.records, offsets_s, strict=True):
        assert record.start_s >= start_s + offset_s - 0.005  # timers count whole milliseconds
    assert run.duration_s >= 0.295


def test_large_workloads_travel_in_portions(scripted_server: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_MESSAGE_BYTES", 100)
    server = scripted_server(echo(0.0))
    run, _ = load(server, 40, 2, limit=4)
    assert [record.text for record in run.records] == [f"p{index}" for index in range(40)]


def test_no_more_processes_than_there_are_streams(scripted_server: Start) -> None:
    server = scripted_server(echo(0.0))
    run, _ = load(server, 3, 8, limit=2)
    assert len(run.records) == 3
    assert server.max_open <= 2


def test_a_dead_process_ends_the_run(scripted_server: Start) -> None:
    server = scripted_server(echo(600.0))
    killer = threading.Thread(target=_kill_one_when, args=(lambda: len(server.seen) == 4,))
    killer.start()
    with pytest.raises(TokenmillError, match="a load generator process died"):
        load(server, 4, 2, limit=None)
    killer.join()
    assert _clients() == []


def _kill_one_when(condition: Callable[[], bool]) -> None:
    wait_for(condition, 60, "requests of all")
    _clients()[0].kill()


def _clients() -> list[psutil.Process]:
    """Those that run."""
    clients = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie has no command line
            if "bench client" in " ".join(child.cmdline()):
                clients.append(child)
    return clients


@pytest.mark.parametrize(
    ("cpus", "streams", "processes"),
    [(2, 256, 1), (16, 256, 4), (16, 32, 1), (16, 64, 2), (64, 1024, 8), (4, 1, 1)],
)
def test_default_processes(cpus: int, streams: int, processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "usable_cpus", lambda: cpus)
    assert default_processes(streams) == processes


def test_shares_are_even() -> None:
    for total, count in itertools.product((1, 7, 256), (1, 3, 8)):
        shares = [clients._share(total, count, index) for index in range(count)]
        assert sum(shares) == total
        assert max(shares) - min(shares) <= 1
