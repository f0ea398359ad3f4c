"""One of several load generator processes: `python -m tokenmill_server.bench.client_process --control-fd N ...`.

The benchmark hands it jobs in portions, first those that only warm the server up. It answers `Prepared` when it has
everything and the warm-up is over, sends the measured jobs when told to, and hands the records back in portions.
"""

import argparse
import asyncio
import gc
import time

import msgspec
import uvloop

from tokenmill_engine.ipc.channel import ChannelClosedError, ControlChannel
from tokenmill_engine.ipc.lifecycle import become_child
from tokenmill_server.bench.http_client import HttpClient
from tokenmill_server.bench.load import Job, send_all
from tokenmill_server.bench.metrics import RequestRecord

_PROGRESS_PERIOD_S = 0.2
_RECORDS_PER_MESSAGE = 256


class Target(msgspec.Struct, tag=True, frozen=True):
    """Where to send, and how many requests at once."""

    base_url: str
    headers: dict[str, str]
    endpoint: str
    max_concurrency: int | None


class Jobs(msgspec.Struct, tag=True, frozen=True):
    """A portion of the requests."""

    jobs: list[Job]
    warmup: bool


class Prepare(msgspec.Struct, tag=True, frozen=True):
    """There are no more jobs: send those for the warm-up."""


class Begin(msgspec.Struct, tag=True, frozen=True):
    """Send the measured jobs. `start_s` is a time of the machine-wide `time.perf_counter`."""

    start_s: float


class Prepared(msgspec.Struct, tag=True, frozen=True):
    """Answer to `Prepare`."""


class Progress(msgspec.Struct, tag=True, frozen=True):
    """Responses that ended since the last one."""

    num_done: int


class Records(msgspec.Struct, tag=True, frozen=True):
    """A portion of what was seen, in the order of the jobs."""

    records: list[RequestRecord]


class Finished(msgspec.Struct, tag=True, frozen=True):
    """The last message."""

    end_s: float
    """When the last response ended (`time.perf_counter`)."""


ToClient = Target | Jobs | Prepare | Begin
FromClient = Prepared | Progress | Records | Finished


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    arguments = parser.parse_args()
    channel: ControlChannel[ToClient] = ControlChannel.from_fd(arguments.control_fd, ToClient)
    become_child("bench client", arguments.parent_pid)
    try:
        target = channel.receive()
        if not isinstance(target, Target):
            raise TypeError(f"the first message must be Target, not {type(target).__name__}")
        uvloop.run(_run(channel, target))
    except ChannelClosedError:
        return  # the benchmark was stopped


async def _run(channel: ControlChannel[ToClient], target: Target) -> None:
    warmups: list[Job] = []
    jobs: list[Job] = []
    client = HttpClient(target.base_url, target.headers)
    while isinstance(message := channel.receive(), Jobs):
        (warmups if message.warmup else jobs).extend(message.jobs)
    if target.max_concurrency is not None:
        await client.open(min(target.max_concurrency, len(jobs)))
    await send_all(client, target.endpoint, warmups, target.max_concurrency, 0.0, _Counter().add)
    gc.collect()
    channel.send(Prepared())
    begin = channel.receive()
    if not isinstance(begin, Begin):
        raise TypeError(f"expected Begin, not {type(begin).__name__}")
    counter = _Counter()
    reporter = asyncio.create_task(counter.report(channel))
    records = await send_all(client, target.endpoint, jobs, target.max_concurrency, begin.start_s, counter.add)
    reporter.cancel()
    client.close()
    for first in range(0, len(records), _RECORDS_PER_MESSAGE):
        channel.send(Records(records[first : first + _RECORDS_PER_MESSAGE]))
    channel.send(Finished(counter.last_s))


class _Counter:
    """Counts responses, and tells the benchmark now and then."""

    def __init__(self) -> None:
        self.last_s = 0.0
        self._num_new = 0

    def add(self) -> None:
        self._num_new += 1
        self.last_s = time.perf_counter()

    async def report(self, channel: ControlChannel[ToClient]) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_PERIOD_S)
            if self._num_new:
                channel.send(Progress(self._num_new))
                self._num_new = 0


if __name__ == "__main__":
    main()
