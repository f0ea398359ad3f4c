"""The parent of every process of a server: starts them, watches them, drains and stops them.

    STARTING ──every process ready──▶ SERVING ──SIGTERM──▶ DRAINING ──▶ done, status 0
        │                                │                     └── SIGTERM ──▶ CUTTING_OFF ──▶ done, status 143
        └── a start failed: raises       └── an engine died ──▶ FAILING ──▶ raises

A dead API server is replaced while the server starts or serves. Whatever happens, no child outlives `serve`.
"""

import contextlib
import logging
import os
import signal
import socket
import time
from collections import deque
from enum import Enum, auto

from tokenmill_engine.errors import EngineDeadError, StartupError
from tokenmill_engine.ipc.channel import ChannelClosedError
from tokenmill_engine.ipc.child import ChildProcess, spawn_child
from tokenmill_engine.ipc.control import (
    Drain,
    Drained,
    EngineBack,
    EngineLost,
    EnginesReady,
    FromApiServer,
    Listening,
    Serving,
    StartFailed,
    ToApiServer,
)
from tokenmill_engine.ipc.lifecycle import process_began
from tokenmill_engine.messages import EngineReady
from tokenmill_server.children import describe_exit, stop_children
from tokenmill_server.config import Configuration
from tokenmill_server.control import ApiServerStart
from tokenmill_server.engine_table import EngineTable, EngineUpdate
from tokenmill_server.flags.data_parallel import resolve_data_parallel, tell_what_has_no_effect
from tokenmill_server.flags.values import FlagValues
from tokenmill_server.launching import child_environment, end_at_once, log_early_stop, stop_signals
from tokenmill_server.listen import bind, release, url_of
from tokenmill_server.run_dir import RunDir
from tokenmill_server.supervisor import EngineSupervisor
from tokenmill_server.watcher import Event, Exited, Said, Signalled, Watcher

logger = logging.getLogger(__name__)

_API_SERVER_MODULE = "tokenmill_server.api_process"
_ERROR_DELIVERY_S = 2.0
"""How long API servers get to tell clients that their engine died."""
_DRAIN_GRACE_S = 3.0
_CUT_OFF_S = 1.0
"""How long API servers get to tell clients that their answers end here, when there is no time for more."""
_REPEAT_S = 1.0
"""Signals this soon after the first are the same wish: `timeout` and others signal a process and its group."""
_MAX_API_SERVER_DEATHS = 5
_DEATHS_WINDOW_S = 60.0


class State(Enum):
    """Where the server is in its life."""

    STARTING = auto()
    SERVING = auto()
    DRAINING = auto()
    CUTTING_OFF = auto()
    FAILING = auto()


def serve(values: FlagValues) -> int:
    """Serves until told to stop; returns the exit status. Main thread only.

    Raises:
        ConfigError: flags contradict each other or do not fit the model, or the address to listen on is impossible.
        StartupError: this machine has not got the device or the memory, the port is taken, or a process could not
            start.
        EngineDeadError: an engine core died; every open request was answered first, as far as possible.
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
        parallel = resolve_data_parallel(values)
        tell_what_has_no_effect(values, parallel)
        num_engines = parallel.size_local
        # Engine cores import for seconds: they may begin while the configuration is checked. Not if there are more of
        # them than cores, which one mistyped digit is enough for.
        spawned = num_engines <= len(os.sched_getaffinity(0))
        if spawned:
            engines.spawn(num_engines, values["device"], environment)
        with signals.handled_by(lambda number: end_at_once(number, engines, run_dir)):
            # Takes a while to import as well.
            from tokenmill_server.flags.build import build_configuration

            configuration = build_configuration(values)
        listener = bind(configuration.server)
        stack.callback(release, listener)
        if not spawned:
            engines.spawn(num_engines, values["device"], environment)
        launcher = Launcher(configuration, listener, run_dir, watcher, engines)
        stack.callback(launcher.stop)
        return launcher.run()


class Launcher:
    """One run of a server."""

    def __init__(
        self,
        configuration: Configuration,
        listener: socket.socket,
        run_dir: RunDir,
        watcher: Watcher,
        engines: EngineSupervisor,
    ) -> None:
        """`engines` are spawned, not configured yet."""
        self._engine_config = configuration.engine
        self._config = configuration.server
        self._listener = listener
        self._run_dir = run_dir
        self._watcher = watcher
        self._engines = engines
        self._table = EngineTable(self._engine_config.data_parallel_size)
        self._announced = False
        """API servers know the engine cores, and are told what changes."""
        self._api_servers: dict[int, ChildProcess[FromApiServer]] = {}
        self._incarnations = dict.fromkeys(range(self._config.api_server_count), 0)
        self._listening: set[int] = set()
        self._serving: set[int] = set()
        self._draining: set[int] = set()
        self._deaths: deque[float] = deque(maxlen=_MAX_API_SERVER_DEATHS)
        self._environment = child_environment(run_dir)
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
        self._engines.configure(self._engine_config)
        for client in range(self._config.api_server_count):
            self._start_api_server(client)
        logger.info(
            "starting %s on %s (%s): engine cores %d, API servers %d",
            self._engine_config.model.name,
            self._engine_config.device.kind,
            self._engine_config.model.dtype,
            self._engine_config.data_parallel_size,
            self._config.api_server_count,
        )
        while self._status is None:
            for event in self._watcher.wait(self._time_to_wait()):
                self._handle(event)
            self._engines.restart_due()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._on_deadline()
        return self._status

    def stop(self) -> None:
        """Ends every API server and waits for it."""
        stop_children(self._api_servers.values())
        self._api_servers.clear()
        self._table.close()

    def _time_to_wait(self) -> float | None:
        """Seconds until there is something to do at which nothing wakes us; None: never."""
        times = [at for at in (self._deadline, self._engines.next_restart) if at is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    # --- events ---------------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        match event:
            case Signalled(number=number):
                self._on_signal(number)
            case Said(key=("engine", _)) | Exited(key=("engine", _)):
                update = self._engines.handle(event)
                if update is not None:
                    self._on_engine(update)
            case Said(key=(_, client), message=message):
                self._on_api_server_message(client, message)
            case Exited(key=(_, client), returncode=returncode):
                self._on_api_server_exit(client, returncode)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._state is State.SERVING:
            timeout_s = self._config.shutdown_timeout_s
            logger.info("%s: finishing open requests for up to %g s; again to stop at once", number.name, timeout_s)
            self._state = State.DRAINING
            self._engines.end_restarts()
            self._draining = set(self._api_servers)
            self._drain_began = time.monotonic()
            self._deadline = self._drain_began + timeout_s + _DRAIN_GRACE_S
            self._broadcast(Drain(timeout_s))
        elif self._state is State.DRAINING:
            if time.monotonic() - self._drain_began >= _REPEAT_S:
                self._cut_off(number)
        elif self._state is State.STARTING:
            log_early_stop(number)
            self._status = 0
        else:
            logger.debug("%s: the end is a moment away already", number.name)

    def _on_engine(self, update: EngineUpdate) -> None:
        """An engine core serves, or is gone."""
        self._table.apply(update)
        match update:
            case EngineReady() if self._announced:
                logger.info("engine core %d serves again", self._engine_config.rank_of(update.engine))
                self._broadcast(EngineBack(update))
            case EngineLost() if self._table.is_hopeless:
                self._fail(update)
            case EngineLost(message=message, restarts=restarts):
                consequence = "it is restarted" if restarts else "it stays away"
                logger.error("%s; its requests are lost, %s", message, consequence)
                if self._announced:
                    self._broadcast(update)
        if not self._announced and self._table.is_settled:
            self._announced = True
            self._broadcast(self._introduction())

    def _introduction(self) -> EnginesReady:
        return EnginesReady(self._table.ready, self._table.lost)

    def _on_api_server_message(self, client: int, message: FromApiServer) -> None:
        match message:
            case Listening():
                self._listening.add(client)
            case Serving():
                self._serving.add(client)
                self._announce_when_ready()
            case StartFailed(message=reason):
                if self._state is State.STARTING:
                    raise StartupError(reason)
                logger.error("API server %d: %s", client, reason)
            case Drained(num_cut_off=num_cut_off):
                self._num_cut_off += num_cut_off
                self._finish_drain(client)

    def _on_api_server_exit(self, client: int, returncode: int) -> None:
        del self._api_servers[client]
        reason = describe_exit(returncode)
        if self._state is State.STARTING and client not in self._listening and returncode >= 0:
            raise StartupError(f"API server {client} {reason} while it was starting")
        self._listening.discard(client)
        self._serving.discard(client)
        if self._state is State.FAILING:
            return
        self._table.client_gone(client, self._incarnations[client] % 256)
        if self._state in (State.DRAINING, State.CUTTING_OFF):
            if client in self._draining:
                self._lost_requests = True
                logger.error("API server %d %s; its requests are lost", client, reason)
            self._finish_drain(client)
            return
        self._count_death(reason)
        logger.error("API server %d %s; its requests are lost, starting another", client, reason)
        self._incarnations[client] += 1
        self._start_api_server(client)
        if self._announced:
            self._send(client, self._introduction())

    def _count_death(self, reason: str) -> None:
        self._deaths.append(time.monotonic())
        if len(self._deaths) == _MAX_API_SERVER_DEATHS and self._deaths[-1] - self._deaths[0] < _DEATHS_WINDOW_S:
            raise EngineDeadError(
                f"API servers ended {_MAX_API_SERVER_DEATHS} times in {_DEATHS_WINDOW_S:.0f} s; the last one {reason}"
            )

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

    def _start_api_server(self, client: int) -> None:
        fd = self._listener.fileno()
        child: ChildProcess[FromApiServer] = spawn_child(
            _API_SERVER_MODULE, FromApiServer, pass_fds=(fd,), env=self._environment
        )
        self._api_servers[client] = child
        self._watcher.add(("api_server", client), child)
        start = ApiServerStart(
            client=client,
            incarnation=self._incarnations[client] % 256,
            run_dir=str(self._run_dir.path),
            listen_fd=fd,
            server=self._config,
            engine=self._engine_config,
        )
        self._send(client, start)

    def _send(self, client: int, message: ApiServerStart | ToApiServer) -> None:
        try:
            self._api_servers[client].channel.send(message)
        except ChannelClosedError:
            logger.debug("API server %d is gone; its end will be noticed", client)

    def _broadcast(self, message: ToApiServer) -> None:
        for client in self._api_servers:
            self._send(client, message)

    def _announce_when_ready(self) -> None:
        if self._state is not State.STARTING or len(self._serving) < self._config.api_server_count:
            return
        self._state = State.SERVING
        total = time.monotonic() - process_began()
        phases = self._table.ready[0].startup_s if self._table.ready else {}
        phases = phases | {"serve": max(0.0, total - sum(phases.values()))}
        logger.info(
            "%s is ready at %s after %.1f s (%s)",
            self._config.served_model_names[0],
            url_of(self._listener),
            total,
            ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in phases.items()),
        )

    def _fail(self, last: EngineLost) -> None:
        """The last engine core is gone: clients are told, then everything ends."""
        if self._state is State.FAILING:
            return
        logger.error("%s; failing all open requests", last.message)
        self._state = State.FAILING
        self._failure = EngineDeadError(last.message)
        self._deadline = time.monotonic() + _ERROR_DELIVERY_S
        self._broadcast(last)

    def _finish_drain(self, client: int) -> None:
        self._draining.discard(client)
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
        self._broadcast(Drain(0.0))
