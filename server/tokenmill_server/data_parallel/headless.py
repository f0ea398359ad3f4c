"""`tokenmill serve --headless`: engine cores for a head that runs elsewhere.

It joins the head before anything loads, tells it what becomes of the engine cores, and ends with it. Requests and
tokens do not pass here: API servers and engine cores speak to each other directly. So when it is told to stop, the
head takes its ranks out of rotation, and knows when nothing runs there any more.
"""

import contextlib
import logging
import signal
import time

import msgspec

from tokenmill_engine.errors import EngineDeadError, TokenmillError
from tokenmill_engine.ipc.channel import ChannelClosedError
from tokenmill_engine.ipc.control import EngineLost, MetricsWanted, Ping, Pulse
from tokenmill_engine.ipc.lifecycle import process_began
from tokenmill_engine.messages import EngineReady
from tokenmill_engine.metric_files import retire_process
from tokenmill_server.config import Configuration, DataParallelConfig
from tokenmill_server.data_parallel.agreement import facts_of
from tokenmill_server.data_parallel.connection import send_if_open
from tokenmill_server.data_parallel.joining import Head, join
from tokenmill_server.data_parallel.messages import (
    Draining,
    FromHead,
    FromLauncher,
    HeadStopped,
    Leaving,
    MetricFiles,
    MetricFilesKept,
    RanksDrained,
    Refused,
)
from tokenmill_server.data_parallel.metric_copies import MetricFilesSource
from tokenmill_server.data_parallel.ranks import phrase
from tokenmill_server.engine_news import log_engine
from tokenmill_server.engine_table import EngineTable, ProcessUpdate
from tokenmill_server.flags.data_parallel import tell_what_has_no_effect
from tokenmill_server.flags.values import FlagValues
from tokenmill_server.launching import (
    child_environment,
    end_at_once,
    is_same_wish,
    may_spawn_early,
    stop_signals,
    stopped_early,
    workers_asked_for,
)
from tokenmill_server.liveness import Liveness
from tokenmill_server.run_dir import RunDir
from tokenmill_server.supervisor import EngineSupervisor
from tokenmill_server.watcher import Event, Exited, Readable, Said, Signalled, Watcher

logger = logging.getLogger(__name__)

_KEY = ("head", 0)
_METRICS_INTERVAL_S = 1.0
"""So much of what engine cores count may be lost when this launcher dies. Whoever asks for metrics gets newer ones."""


def serve_headless(values: FlagValues, parallel: DataParallelConfig) -> int:
    """Runs engine cores until told to stop, or until the head stops; returns the exit status. Main thread only.

    Raises:
        ConfigError: flags contradict each other or do not fit the model, or the head does not let this launcher in.
        StartupError: this machine has not got the device or the memory, or a process could not start.
        EngineDeadError: the head is gone, or the last engine core.
    """
    tell_what_has_no_effect(values, parallel)
    with (
        Watcher() as watcher,
        watcher.watch_signals(stop_signals(), restore=False) as signals,
        RunDir() as run_dir,
        contextlib.ExitStack() as stack,
    ):
        head: Head | None = None
        engines = EngineSupervisor(
            str(run_dir.path),
            watcher,
            process_began(),
            bind=lambda rank, incarnation: _joined(head).bind(),
            removes_run_dir=True,
        )
        stack.callback(engines.stop)
        spawn_first = may_spawn_early(parallel.size_local, workers_asked_for(values))
        if spawn_first:
            _spawn(engines, values, parallel, run_dir)
        with signals.handled_by(lambda number: end_at_once(number, engines, run_dir)):
            # Takes a while to import.
            from tokenmill_server.flags.build import build_configuration

            configuration = build_configuration(values)
            head = join(parallel, facts_of(configuration.engine, parallel))
        stack.callback(head.channel.close)
        if not spawn_first:
            _spawn(engines, values, parallel, run_dir)
        return HeadlessLauncher(configuration, head, run_dir, watcher, engines).run()


def _spawn(engines: EngineSupervisor, values: FlagValues, parallel: DataParallelConfig, run_dir: RunDir) -> None:
    engines.spawn(
        parallel.size_local,
        values["device"],
        child_environment(run_dir),
        first_rank=parallel.start_rank,
        num_workers=workers_asked_for(values),
    )


def _without_key(update: ProcessUpdate) -> ProcessUpdate:
    """As it may travel: whoever knows the key of an engine core's sockets may use them."""
    if isinstance(update, EngineReady):
        return msgspec.structs.replace(update, endpoints=msgspec.structs.replace(update.endpoints, key=""))
    return update


def _joined(head: Head | None) -> Head:
    assert head is not None, "engine cores are configured after the head was joined"
    return head


class HeadlessLauncher:
    """One run, from when the head has let it in."""

    def __init__(
        self, configuration: Configuration, head: Head, run_dir: RunDir, watcher: Watcher, engines: EngineSupervisor
    ) -> None:
        """`engines` are spawned, not configured yet."""
        self._configuration = configuration
        self._ranks = configuration.data_parallel.local_ranks
        self._head = head
        self._watcher = watcher
        self._engines = engines
        self._table = EngineTable(len(self._ranks))
        self._metrics_dir = str(run_dir.metrics)
        self._metrics = MetricFilesSource(run_dir.metrics)
        self._metrics_due = 0.0
        self._metrics_kept = True
        """The head has taken in what was sent last."""
        self._liveness = Liveness(gives_up=configuration.faults.engine_stall_timeout_s > 0)
        """Of the head."""
        self._is_announced = False
        self._drain_began: float | None = None
        self._deadline = float("inf")
        """Of the drain, on the monotonic clock."""
        self._parting = "it was told to stop"
        self._status: int | None = None

    def run(self) -> int:
        """Handles what happens until this launcher is to end; returns the exit status."""
        self._watcher.watch(self._head.channel, _KEY)
        self._liveness.watch(_KEY, self._head.channel)
        self._liveness.expect_answers(_KEY)
        try:
            self._engines.configure(self._configuration.engine, self._configuration.faults)
            while self._status is None:
                for event in self._watcher.wait(self._time_to_wait()):
                    self._handle(event)
                for update in self._engines.tick():
                    self._tell(update)
                for _, fault in self._liveness.look():
                    raise EngineDeadError(f"the head at {self._head.address} {fault}, and its launchers end with it")
                if time.monotonic() >= self._deadline and self._status is None:
                    logger.warning("stopped; what still ran on %s gets an error", phrase(self._ranks))
                    self._end(0, "it was told to stop, and what runs there had no more time")
                self._send_metrics()
            # Engine cores that are told to end take the folder with the metrics for one that nobody owns any more.
            self._send_metrics(last=True)
            self._send(Leaving(self._parting, planned=True))
            return self._status
        except TokenmillError as error:
            self._send(Leaving(error.message))
            raise

    def _time_to_wait(self) -> float:
        metrics_due = self._metrics_due if self._metrics_kept else float("inf")
        at = min(self._engines.next_tick, self._liveness.next_look, metrics_due, self._deadline)
        return max(0.0, at - time.monotonic())

    def _handle(self, event: Event) -> None:
        match event:
            case Signalled(number=number):
                self._on_signal(number)
            case Said(key=("engine", _)) | Exited(key=("engine", _)):
                update = self._engines.handle(event)
                if isinstance(event, Exited):
                    retire_process(self._metrics_dir, event.pid)
                if update is not None:
                    self._tell(update)
            case Readable():
                self._hear()

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._is_announced:
            logger.info("%s: stopping; the head goes on without %s", number.name, phrase(self._ranks))
            self._status = stopped_early(number)
        elif self._drain_began is None:
            timeout_s = self._configuration.server.shutdown_timeout_s
            what = f"finishing what runs on {phrase(self._ranks)}"
            logger.info("%s: %s for up to %g s; again to stop at once", number.name, what, timeout_s)
            self._drain_began = time.monotonic()
            self._deadline = self._drain_began + timeout_s
            self._engines.end_restarts()
            self._send(Draining())
        elif not is_same_wish(number, self._drain_began):
            logger.warning("%s again: what runs on %s is cut off", number.name, phrase(self._ranks))
            self._end(128 + number, "it was told to stop at once")

    def _end(self, status: int, parting: str | None = None) -> None:
        self._status = status
        self._parting = parting or self._parting

    def _hear(self) -> None:
        try:
            messages = self._head.channel.receive_available()
        except ChannelClosedError:
            if self._status is None:
                raise EngineDeadError(
                    f"the head at {self._head.address} is gone, and its launchers end with it"
                ) from None
            return
        self._liveness.answered(_KEY)
        for message in messages:
            self._take(message)

    def _take(self, message: FromHead) -> None:
        match message:
            case Ping():
                self._send(Pulse())
            case MetricFilesKept():
                self._metrics_kept = True
            case MetricsWanted(number=number):
                self._send(MetricFiles(self._metrics.changes(), number))
            case HeadStopped():
                logger.info("the head has stopped; so does this launcher")
                self._end(0)
            case RanksDrained() if self._drain_began is not None:
                logger.info("all requests on %s are finished; stopped", phrase(self._ranks))
                self._end(0)
            case Refused(message=reason):
                raise EngineDeadError(f"the head lets this launcher go: {reason}")

    def _tell(self, update: ProcessUpdate) -> None:
        """Tells the head what became of an engine core. Raises EngineDeadError if it was the last one."""
        drains = self._drain_began is not None
        if drains and isinstance(update, EngineReady):
            return  # too late
        self._table.apply(update)
        self._send(_without_key(update))
        match update:
            case EngineReady() if len(self._table.ready) == len(self._ranks) and not self._is_announced:
                self._is_announced = True
                logger.info(
                    "ready: %s for the head at %s after %.1f s",
                    phrase(self._ranks),
                    self._head.address,
                    time.monotonic() - process_began(),
                )
            case EngineReady() if not self._is_announced:
                pass
            case EngineLost(message=message) if self._table.is_hopeless or (drains and not self._table.ready):
                raise EngineDeadError(message)
            case _:
                log_engine(update, update.engine, self._configuration.faults.engine_stall_timeout_s)

    def _send_metrics(self, last: bool = False) -> None:
        now = time.monotonic()
        if not last and (now < self._metrics_due or not self._metrics_kept):
            return
        self._metrics_due = now + _METRICS_INTERVAL_S
        if changes := self._metrics.changes():
            self._metrics_kept = False
            self._send(MetricFiles(changes))

    def _send(self, message: FromLauncher) -> None:
        send_if_open(self._head.channel, message)
