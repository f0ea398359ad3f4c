"""The metric files of a server's processes: one page for all of them, whoever renders it. Torch-free.

prometheus-client keeps the values of each process in memory-mapped files that outlive it. Which series there are is no
business of this module, except those about the processes themselves.
"""

import contextlib
import glob
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import psutil
from prometheus_client import CollectorRegistry, PlatformCollector, generate_latest, values
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FILE = re.compile(r"(counter|gauge_mostrecent|histogram)_(\d+)\.db")
_USED = struct.Struct("=i")
"""What a file begins with: how many of its bytes are in use, these included."""
_TITLE = "tokenmill: "
_WORKER_TITLE = f"{_TITLE}worker "
_ATTEMPTS = 5


def render_metrics(directory: str, launcher: int | None = None, *, has_workers: bool = False) -> bytes:
    """The text exposition (`CONTENT_TYPE`) of every process, living and dead, that writes to `directory`; with the
    process id of their `launcher` also of the living processes themselves. `has_workers`: of those, which write
    nothing, too.

    Raises:
        FileNotFoundError: the directory is gone.
    """
    registry = CollectorRegistry()
    registry.register(_MergedFiles(directory))
    if launcher is not None:
        registry.register(ProcessCollector(lambda: _living(directory, launcher, has_workers)))
        PlatformCollector(registry)
    for _ in range(_ATTEMPTS - 1):
        # A file that is listed is gone when it is read if its process is retired in between.
        with contextlib.suppress(FileNotFoundError):
            return generate_latest(registry)
    return generate_latest(registry)


def write_metrics_to(directory: str) -> None:
    """Series that this process creates from now on are kept in `directory`. For one that was started without the
    variable PROMETHEUS_MULTIPROC_DIR, which prometheus-client looks at when it is imported."""
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = directory
    values.ValueClass = values.get_value_class()  # type: ignore[no-untyped-call]


def retire_process(directory: str, pid: int) -> None:
    """Takes note that process `pid` has ended: what it counted stays, in as few bytes as possible, its gauges say
    nothing any more."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(directory, f"gauge_mostrecent_{pid}.db"))
    for kind in ("counter", "histogram"):
        with contextlib.suppress(FileNotFoundError), open(os.path.join(directory, f"{kind}_{pid}.db"), "r+b") as file:
            header = file.read(_USED.size)
            if len(header) == _USED.size:
                file.truncate(max(_USED.size, _USED.unpack(header)[0]))


class _MergedFiles(Collector):
    """The files of all processes as one set of series."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def collect(self) -> Iterable[Metric]:
        # A file is empty for an instant when a starting process creates it.
        paths = [path for path in glob.glob(os.path.join(self._directory, "*.db")) if os.path.getsize(path) > 0]
        merged: Iterable[Metric] = MultiProcessCollector.merge(paths)  # type: ignore[no-untyped-call]
        return merged


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """What the kernel knows of one process. `name` is its title, without ours before it."""

    name: str
    virtual_bytes: int
    resident_bytes: int
    cpu_s: float
    started_at: float
    """Seconds since the epoch."""
    num_fds: int
    max_fds: int


class ProcessCollector(Collector):
    """The `process_*` series that every Prometheus client has, one per process of the server."""

    def __init__(self, processes: Callable[[], Iterable[ProcessFacts]]) -> None:
        self._processes = processes

    def collect(self) -> Iterable[Metric]:
        labels = ["process"]
        gauges = {
            "virtual_bytes": GaugeMetricFamily(
                "process_virtual_memory_bytes", "Virtual memory of a process.", labels=labels
            ),
            "resident_bytes": GaugeMetricFamily(
                "process_resident_memory_bytes", "Resident memory of a process.", labels=labels
            ),
            "started_at": GaugeMetricFamily(
                "process_start_time_seconds", "When a process began, since the epoch.", labels=labels
            ),
            "num_fds": GaugeMetricFamily("process_open_fds", "Open file descriptors of a process.", labels=labels),
            "max_fds": GaugeMetricFamily("process_max_fds", "Limit of open file descriptors.", labels=labels),
        }
        cpu = CounterMetricFamily("process_cpu_seconds", "CPU time of a process, user and system.", labels=labels)
        for process in sorted(self._processes(), key=lambda process: process.name):
            for fact, family in gauges.items():
                family.add_metric([process.name], getattr(process, fact))
            cpu.add_metric([process.name], process.cpu_s)
        return [*gauges.values(), cpu]


def _living(directory: str, launcher: int, has_workers: bool) -> Iterator[ProcessFacts]:
    """The launcher, those of its children that have metric files and have said what they are, and workers."""
    matches = [_FILE.fullmatch(name) for name in os.listdir(directory)]
    for pid in {launcher, *(int(match[2]) for match in matches if match)}:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            with process.oneshot():
                title = " ".join(process.cmdline()).strip()
                # The number of a dead process may belong to a stranger by now.
                if title.startswith(_TITLE) and launcher in (pid, process.ppid()):
                    yield _facts(process, title.removeprefix(_TITLE))
    if has_workers:
        yield from _workers(launcher)


def _workers(launcher: int) -> Iterator[ProcessFacts]:
    """Found by their titles among the processes of this machine, whose number is what it costs."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(launcher).children(recursive=True):
            with contextlib.suppress(psutil.Error), process.oneshot():
                title = " ".join(process.cmdline()).strip()
                if title.startswith(_WORKER_TITLE):
                    yield _facts(process, title.removeprefix(_TITLE))


def _facts(process: psutil.Process, name: str) -> ProcessFacts:
    memory, cpu = process.memory_info(), process.cpu_times()
    return ProcessFacts(
        name=name,
        virtual_bytes=memory.vms,
        resident_bytes=memory.rss,
        cpu_s=cpu.user + cpu.system,
        started_at=process.create_time(),
        num_fds=process.num_fds(),
        max_fds=process.rlimit(psutil.RLIMIT_NOFILE)[0],
    )
