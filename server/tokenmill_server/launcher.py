"""The parent of every process of a server: starts them, watches them, drains and stops them.

    STARTING ──every process ready──▶ SERVING ──SIGTERM──▶ DRAINING ──▶ done, status 0
        │                                │                     └── SIGTERM ──▶ CUTTING_OFF ──▶ done, status 143
        └── a start failed: raises       └── the last engine died ──▶ FAILING ──▶ raises

A dead API server is replaced, and a dead engine core restarted, while the server starts or serves. Whatever happens, no
child outlives `serve`.
"""

import contextlib
import logging
import signal
import socket
import time
from collections.abc import Sequence
from enum import Enum, auto

from tokenmill_engine.errors import EngineDeadError, StartupError
from tokenmill_engine.ipc.control import (
    Drain,
    Drained,
    EngineBack,
    EngineDrained,
    EngineDraining,
    EngineLost,
    FromApiServer,
    Listening,
    MetricsFetched,
    MetricsWanted,
    Pulse,
    RanksMissing,
    Serving,
    StartFailed,
)
from tokenmill_engine.ipc.lifecycle import process_began
from tokenmill_engine.messages import EngineReady
from tokenmill_server.api_servers import ApiServers
from tokenmill_server.config import Configuration, DataParallelConfig
from tokenmill_server.data_parallel.agreement import facts_of
from tokenmill_server.data_parallel.head import RemoteEngines
from tokenmill_server.engine_monitor import EngineMonitor
from tokenmill_server.engine_news import log_engine, log_sharing
from tokenmill_server.engine_table import EngineTable, EngineUpdate
from tokenmill_server.flags.data_parallel import tell_what_has_no_effect
from tokenmill_server.flags.values import FlagValues
from tokenmill_server.launching import (
    child_environment,
    end_at_once,
    is_same_wish,
    log_early_stop,
    may_spawn_early,
    stop_signals,
    stopped_early,
    workers_asked_for,
)
from tokenmill_server.listen import bind, release, url_of
from tokenmill_server.media_segments import create_segments, may_share
from tokenmill_server.run_dir import RunDir
from tokenmill_server.supervisor import EngineSupervisor
from tokenmill_server.watcher import Event, Exited, Readable, Said, Signalled, Watcher

logger = logging.getLogger(__name__)

_ERROR_DELIVERY_S = 2.0
"""How long API servers get to tell clients that their engine died."""
_DRAIN_GRACE_S = 3.0
_CUT_OFF_S = 1.0
"""How long API servers get to tell clients that their answers end here, when there is no time for more."""


class State(Enum):
    """Where the server is in its life."""

    STARTING = auto()
    SERVING = auto()
    DRAINING = auto()
    CUTTING_OFF = auto()
    FAILING = auto()


def serve(values: FlagValues, parallel: DataParallelConfig) -> int:
    """Serves until told to stop; returns the exit status. Main thread only.

    Raises:
        ConfigError: flags contradict each other or do not fit the model, or an address to listen on is impossible.
        StartupError: this machine has not got the device or the memory, a port is taken, or a process could not
            start.
        EngineDeadError: the last engine core died; every open request was answered first, as far as possible.
    """
    with (
        Watcher() as watcher,
        watcher.watch_signals(stop_signals(), restore=False) as signals,
        RunDir() as run_dir,
        contextlib.ExitStack() as stack,
    ):
        engines = EngineSupervisor(str(run_dir.path), watcher, process_began())
        stack.callback(engines.stop)
        environment = child_environment(run_dir)
        tell_what_has_no_effect(values, parallel)
        num_engines, num_workers = parallel.size_local, workers_asked_for(values)
        # What imports for seconds may begin while the configuration is checked.
        # Not before it is known how many API servers share memory with them.
        spawned = may_spawn_early(num_engines, num_workers) and not may_share(values)
        if spawned:
            engines.spawn(num_engines, values["device"], environment, num_workers=num_workers)
        with signals.handled_by(lambda number: end_at_once(number, engines, run_dir)):
            # Takes a while to import as well.
            from tokenmill_server.flags.build import build_configuration

            configuration = build_configuration(values)
        listener = bind(configuration.server)
        stack.callback(release, listener)
        segments = stack.enter_context(create_segments(configuration))
        if not spawned:
            engines.spawn(num_engines, values["device"], environment, num_workers=num_workers, segments=segments)
        remote = None
        if parallel.is_head:
            facts = facts_of(configuration.engine, parallel)
            gives_up = configuration.faults.engine_stall_timeout_s > 0
            remote = RemoteEngines(parallel, facts, watcher, run_dir.metrics, gives_up)
            stack.callback(remote.close)
        launcher = Launcher(configuration, listener, run_dir, watcher, engines, remote, segments)
        stack.callback(launcher.stop)
        status = launcher.run()
        if remote is not None:
            remote.say_goodbye()
        return status


class Launcher:
    """One run of a server."""

    def __init__(
        self,
        configuration: Configuration,
        listener: socket.socket,
        run_dir: RunDir,
        watcher: Watcher,
        engines: EngineSupervisor,
        remote: RemoteEngines | None = None,
        segments: Sequence[int] = (),
    ) -> None:
        """`engines` are spawned, not configured yet; `remote` are those of headless launchers, where there are any;
        `segments` as in `ApiServers`."""
        self._configuration = configuration
        self._listener = listener
        self._watcher = watcher
        self._engines = engines
        self._remote = remote
        self._table = EngineTable(configuration.engine.data_parallel_size)
        self._announced = False
        """API servers know the engine cores, and are told what changes."""
        self._missing: list[int] = []
        """The ranks that no launcher has, as API servers were told before that."""
        self._api_servers = ApiServers(
            configuration, listener.fileno(), str(run_dir.path), child_environment(run_dir), watcher, segments
        )
        self._segments = segments
        self._monitor = EngineMonitor(configuration.engine, str(run_dir.metrics))
        self._draining: set[int] = set()
        self._state = State.STARTING
        self._deadline: float | None = None
        self._drain_began = 0.0
        self._num_cut_off = 0
        self._lost_requests = False
        self._exit_status = 0
        """Of an end that a signal brought about."""
        self._failure: EngineDeadError | None = None
        self._status: int | None = None

    def run(self) -> int:
        """Starts the API servers and handles what all processes do until the server is to end; returns its exit
        status."""
        engine = self._configuration.engine
        self._engines.configure(engine, self._configuration.faults)
        self._api_servers.start()
        logger.info(
            "starting %s on %s (%s): engine cores %d, API servers %d",
            engine.model.name,
            engine.device.kind,
            engine.model.dtype,
            engine.data_parallel_size,
            self._configuration.server.api_server_count,
        )
        while self._status is None:
            self._tell_of_missing()
            for event in self._watcher.wait(self._time_to_wait()):
                self._handle(event)
            for update in self._engines.tick():
                self._on_engine(update)
            for news in self._remote.tick() if self._remote is not None else ():
                self._on_engine(news)
            for client in self._api_servers.tick():
                if self._announced:
                    self._api_servers.send(client, self._table.introduction)
                elif self._missing:
                    self._api_servers.send(client, RanksMissing(self._missing))
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._on_deadline()
        return self._status

    def stop(self) -> None:
        """Ends every API server and waits for it."""
        self._api_servers.stop()
        self._table.close()

    def _time_to_wait(self) -> float:
        """Seconds until there is something to do at which nothing wakes us."""
        next_tick = min(self._engines.next_tick, self._api_servers.next_tick)
        if self._remote is not None:
            next_tick = min(next_tick, self._remote.next_tick)
        at = next_tick if self._deadline is None else min(next_tick, self._deadline)
        return max(0.0, at - time.monotonic())

    # --- events ---------------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        if isinstance(event, Exited):
            self._monitor.process_gone(event.pid)
        match event:
            case Signalled(number=number):
                self._on_signal(number)
            case Said(key=("engine", _)) | Exited(key=("engine", _)):
                update = self._engines.handle(event)
                if update is not None:
                    self._on_engine(update)
            case Readable() if self._remote is not None:
                for news in self._remote.handle(event):
                    self._on_engine(news)
            case Said(key=(_, client), message=message):
                self._on_api_server_message(client, message)
            case Exited(key=(_, client), returncode=returncode):
                self._on_api_server_exit(client, returncode)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._state is State.SERVING:
            timeout_s = self._configuration.server.shutdown_timeout_s
            logger.info("%s: finishing open requests for up to %g s; again to stop at once", number.name, timeout_s)
            self._state = State.DRAINING
            self._engines.end_restarts()
            self._api_servers.end_replacements()
            self._draining = self._api_servers.running
            self._drain_began = time.monotonic()
            self._deadline = self._drain_began + timeout_s + _DRAIN_GRACE_S
            self._api_servers.broadcast(Drain(timeout_s))
            self._end_when_drained()
        elif self._state is State.DRAINING:
            if not is_same_wish(number, self._drain_began):
                self._cut_off(number)
        elif self._state is State.STARTING:
            log_early_stop(number)
            self._status = stopped_early(number)
        else:
            logger.debug("%s: the end is a moment away already", number.name)

    def _on_engine(self, update: EngineUpdate) -> None:
        """Something has become of an engine core."""
        if isinstance(update, EngineDraining) and self._remote is not None:
            if self._state not in (State.STARTING, State.SERVING):
                # This server's requests may still need it.
                logger.info("the launcher of engine core %d ends with this server", update.engine)
                return
            self._remote.drains.begin(update, self._api_servers.running if self._announced else ())
        self._table.apply(update)
        self._monitor.apply(update)
        self._log_engine(update)
        if isinstance(update, EngineReady):
            log_sharing(update, self._configuration.engine.rank_of(update.engine), bool(self._segments))
        if isinstance(update, EngineLost) and (self._table.is_hopeless or self._is_last_of_drain(update)):
            self._fail(update)
        elif self._announced:
            self._api_servers.broadcast(EngineBack(update) if isinstance(update, EngineReady) else update)
        elif self._table.is_settled:
            self._announced = True
            self._api_servers.broadcast(self._table.introduction)

    def _tell_of_missing(self) -> None:
        """While the server starts, who asks how it is hears for which launchers it waits."""
        if self._remote is not None and not self._announced and self._remote.missing != self._missing:
            self._missing = self._remote.missing
            self._api_servers.broadcast(RanksMissing(self._missing))

    def _is_last_of_drain(self, lost: EngineLost) -> bool:
        return self._state is State.DRAINING and not self._table.ready and not lost.planned

    def _log_engine(self, update: EngineUpdate) -> None:
        if isinstance(update, EngineReady) and not self._announced:
            return
        rank = self._configuration.engine.rank_of(update.engine)
        restart = "starting it again" if self._engines.has(update.engine) else "its launcher starts it again"
        log_engine(update, rank, self._configuration.faults.engine_stall_timeout_s, restart)

    def _on_api_server_message(self, client: int, message: FromApiServer) -> None:
        match message:
            case Listening():
                self._api_servers.listens(client)
            case Serving():
                self._api_servers.serves(client)
                self._announce_when_ready()
            case MetricsWanted(number=number) if self._remote is not None:
                self._remote.fetch_metrics(lambda: self._api_servers.send(client, MetricsFetched(number)))
            case EngineDrained() if self._remote is not None:
                self._remote.drains.answered(client, message)
            case Pulse():
                self._api_servers.answered(client)
            case StartFailed(message=reason):
                if self._state is State.STARTING:
                    raise StartupError(reason)
                logger.error("API server %d: %s", client, reason)
            case Drained(num_cut_off=num_cut_off):
                self._num_cut_off += num_cut_off
                self._finish_drain(client)

    def _on_api_server_exit(self, client: int, returncode: int) -> None:
        was_listening = self._api_servers.is_listening(client)
        reason = self._api_servers.ended(client, returncode)
        if self._state is State.STARTING and not was_listening and returncode >= 0:
            raise StartupError(f"API server {client} {reason} while it was starting")
        if self._state is State.FAILING:
            return
        self._table.client_gone(client, self._api_servers.incarnation(client))
        if self._remote is not None:
            self._remote.drains.client_gone(client)
        if self._state in (State.DRAINING, State.CUTTING_OFF):
            if client in self._draining:
                self._lost_requests = True
                logger.error("API server %d %s; its requests are lost", client, reason)
            self._finish_drain(client)
            return
        self._api_servers.count_death(reason)
        logger.error("API server %d %s; its requests are lost, starting another", client, reason)
        self._api_servers.replace(client)

    def _on_deadline(self) -> None:
        if self._failure is not None:
            raise self._failure
        logger.warning(
            "stopped; requests cut off: %d, and whatever was open in the API servers that did not answer: %d",
            self._num_cut_off,
            len(self._draining),
        )
        self._status = self._exit_status

    # --- actions --------------------------------------------------------------------------------------------------

    def _announce_when_ready(self) -> None:
        if self._state is not State.STARTING or not self._api_servers.all_serve:
            return
        self._state = State.SERVING
        total = time.monotonic() - process_began()
        phases = self._table.ready[0].startup_s if self._table.ready else {}
        phases = phases | {"serve": max(0.0, total - sum(phases.values()))}
        logger.info(
            "%s is ready at %s after %.1f s (%s)",
            self._configuration.server.served_model_names[0],
            url_of(self._listener, "http" if self._configuration.server.ssl_certfile is None else "https"),
            total,
            ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in phases.items()),
        )

    def _fail(self, last: EngineLost) -> None:
        """The last engine core is gone: clients are told, then everything ends."""
        if self._state is State.FAILING:
            return
        self._state = State.FAILING
        self._api_servers.end_replacements()
        self._failure = EngineDeadError(last.message)
        self._deadline = time.monotonic() + _ERROR_DELIVERY_S
        self._api_servers.broadcast(last)

    def _finish_drain(self, client: int) -> None:
        self._draining.discard(client)
        self._end_when_drained()

    def _end_when_drained(self) -> None:
        if self._state not in (State.DRAINING, State.CUTTING_OFF) or self._draining:
            return
        if self._num_cut_off:
            logger.warning("stopped; requests cut off: %d", self._num_cut_off)
        elif self._lost_requests:
            logger.warning("stopped")
        else:
            logger.info("all requests are finished; stopped")
        self._status = self._exit_status

    def _cut_off(self, number: signal.Signals) -> None:
        """No more time for open requests: their clients are told, then everything ends."""
        logger.warning("%s again: open requests are cut off", number.name)
        self._state = State.CUTTING_OFF
        self._exit_status = 128 + number
        self._deadline = time.monotonic() + _CUT_OFF_S
        self._api_servers.broadcast(Drain(0.0))
