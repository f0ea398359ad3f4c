"""Drives the load: in this process, or spread evenly over several that start at the same moment."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import uvloop

from tokenmill_engine.config.device import usable_cpus
from tokenmill_engine.errors import TokenmillError
from tokenmill_engine.ipc.channel import ChannelClosedError
from tokenmill_engine.ipc.child import ChildProcess, spawn_child
from tokenmill_engine.ipc.signals import END_SIGNAL
from tokenmill_server.bench.client_process import (
    Begin,
    Finished,
    FromClient,
    Jobs,
    Prepare,
    Prepared,
    Progress,
    Records,
    Target,
)
from tokenmill_server.bench.http_client import HttpClient
from tokenmill_server.bench.load import Job, send_all
from tokenmill_server.bench.metrics import RequestRecord

_MODULE = "tokenmill_server.bench.client_process"
_CPUS_PER_CLIENT = 4
_STREAMS_PER_CLIENT = 32
_MAX_CLIENTS = 8
_MESSAGE_BYTES = 8 * 2**20
_START_DELAY_S = 0.02
"""From the last process's word that it is prepared to the common start."""


@dataclass(slots=True, frozen=True)
class Run:
    """What came of the measured jobs."""

    records: list[RequestRecord]
    """In the order of the jobs."""
    duration_s: float
    """From the common start to the end of the last response."""


def default_processes(num_streams: int) -> int:
    """Load generator processes for so many concurrent requests on this machine: one for every four CPUs at most, the
    rest is for the server, and none with fewer than 32 streams of its own."""
    return max(1, min(usable_cpus() // _CPUS_PER_CLIENT, num_streams // _STREAMS_PER_CLIENT, _MAX_CLIENTS))


def run_load(
    target: Target,
    warmups: Sequence[Job],
    jobs: Sequence[Job],
    num_processes: int,
    on_progress: Callable[[int], object],
) -> Run:
    """Sends the warm-up and waits for its end, then the measured jobs. `on_progress` hears how many more are done.

    Raises:
        TokenmillError: a load generator process died.
    """
    num_processes = max(1, min(num_processes, len(jobs), target.max_concurrency or len(jobs)))
    if num_processes == 1:
        return uvloop.run(_run_here(target, warmups, jobs, on_progress))
    try:
        with _spawned(num_processes) as clients:
            return _run_in(clients, target, warmups, jobs, on_progress)
    except ChannelClosedError as error:
        raise TokenmillError(f"a load generator process died ({error})") from error


async def _run_here(
    target: Target, warmups: Sequence[Job], jobs: Sequence[Job], on_progress: Callable[[int], object]
) -> Run:
    client = HttpClient(target.base_url, target.headers)
    end_s = 0.0

    def on_done() -> None:
        nonlocal end_s
        end_s = time.perf_counter()
        on_progress(1)

    if target.max_concurrency is not None:
        await client.open(min(target.max_concurrency, len(jobs)))
    await send_all(client, target.endpoint, warmups, target.max_concurrency, 0.0, lambda: None)
    gc.collect()
    start_s = time.perf_counter()
    records = await send_all(client, target.endpoint, jobs, target.max_concurrency, start_s, on_done)
    client.close()
    return Run(records, end_s - start_s)


@contextlib.contextmanager
def _spawned(count: int) -> Iterator[list[ChildProcess[FromClient]]]:
    """Processes that end with the block, whatever happens in it."""
    clients: list[ChildProcess[FromClient]] = []
    try:
        clients.extend(spawn_child(_MODULE, FromClient) for _ in range(count))
        yield clients
    finally:
        for client in clients:
            client.channel.close()
            client.process.send_signal(END_SIGNAL)
            client.process.wait()


def _run_in(
    clients: Sequence[ChildProcess[FromClient]],
    target: Target,
    warmups: Sequence[Job],
    jobs: Sequence[Job],
    on_progress: Callable[[int], object],
) -> Run:
    count = len(clients)
    for index, client in enumerate(clients):
        limit = None if target.max_concurrency is None else _share(target.max_concurrency, count, index)
        client.channel.send(Target(target.base_url, target.headers, target.endpoint, limit))
        for warmup, its_jobs in ((True, warmups[index::count]), (False, jobs[index::count])):
            for portion in _portions(its_jobs):
                client.channel.send(Jobs(portion, warmup))
        client.channel.send(Prepare())
    for client in clients:
        if not isinstance(message := client.channel.receive(), Prepared):
            raise TypeError(f"expected Prepared, not {type(message).__name__}")
    start_s = time.perf_counter() + _START_DELAY_S
    for client in clients:
        client.channel.send(Begin(start_s))
    collected = [_collect(client, on_progress) for client in clients]
    records = [collected[index % count][0][index // count] for index in range(len(jobs))]
    return Run(records, max(end_s for _, end_s in collected) - start_s)


def _collect(
    client: ChildProcess[FromClient], on_progress: Callable[[int], object]
) -> tuple[list[RequestRecord], float]:
    """All records of one process, and when it was done."""
    records: list[RequestRecord] = []
    while True:
        match client.channel.receive():
            case Progress(num_done=num_done):
                on_progress(num_done)
            case Records(records=portion):
                records.extend(portion)
            case Finished(end_s=end_s):
                return records, end_s


def _share(total: int, count: int, index: int) -> int:
    """The `index`-th of `count` nearly equal parts."""
    return total // count + (index < total % count)


def _portions(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    """`jobs` in lists of a few megabytes."""
    portion: list[Job] = []
    size = 0
    for job in jobs:
        portion.append(job)
        size += len(job.body)
        if size >= _MESSAGE_BYTES:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion
