"""Sends prepared requests to a server at their times, never more at once than allowed. Knows nothing of what they say.

Runs in the process of the benchmark or, for servers that one client could not keep busy, in several of their own.
"""

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenmill_server.bench.event_stream import StreamSink
from tokenmill_server.bench.http_client import HttpClient
from tokenmill_server.bench.metrics import RequestRecord

_MAX_UNPARSED_BYTES = 256 * 2**20
"""Above this responses are parsed as they end, at the cost of some delay for those that still run."""


@dataclass(slots=True, frozen=True)
class Job:
    """One request to send."""

    body: bytes
    prompt_tokens: int
    max_tokens: int
    offset_s: float = 0.0
    """When to send it, from the start of the run."""


async def send_all(
    client: HttpClient,
    endpoint: str,
    jobs: Sequence[Job],
    max_concurrency: int | None,
    start_s: float,
    on_done: Callable[[], object],
) -> list[RequestRecord]:
    """Sends every job in turn, each as soon as its time has come and fewer than `max_concurrency` are open.

    `start_s` is a time of `time.perf_counter`, `on_done` is called after each response. Records are in the order of
    the jobs.
    """
    records = [RequestRecord(job.prompt_tokens, job.max_tokens) for job in jobs]
    sinks: list[StreamSink] = []
    waiting = iter(zip(jobs, records, strict=True))
    num_unparsed_bytes = 0

    async def send_next() -> None:
        nonlocal num_unparsed_bytes
        for job, record in waiting:
            # Timers of the loop count whole milliseconds of a clock that may lag behind: they may come too early.
            while (delay_s := start_s + job.offset_s - time.perf_counter()) > 0:
                await asyncio.sleep(delay_s)
            sink = await client.stream(endpoint, job.body, record)
            if num_unparsed_bytes + sink.num_bytes > _MAX_UNPARSED_BYTES:
                sink.close()
            else:
                num_unparsed_bytes += sink.num_bytes
                sinks.append(sink)
            on_done()

    # Nothing here makes reference circles: a search for some in the middle of the run would only delay it. What was
    # there before is the caller's: a search for it takes time that the run has not to spare once it has a start.
    gc.disable()
    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(max_concurrency or len(jobs), len(jobs))):
                tasks.create_task(send_next())
    finally:
        gc.enable()
    for sink in sinks:
        sink.close()
    return records
