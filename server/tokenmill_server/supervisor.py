"""Starts, watches, restarts and stops the engine cores of this machine. Shared by the launcher and `LLM`; knows nothing
of HTTP.

A rank that dies is started again, unless it does so too often: each time it served for less than `_FORGIVEN_AFTER_S`
counts, and after more than `max_engine_restarts` of those it stays away. One that hangs is killed, which is a death.
"""

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.errors import StartupError
from tokenmill_engine.ipc.channel import ChannelClosedError
from tokenmill_engine.ipc.child import ChildProcess, spawn_child
from tokenmill_engine.ipc.control import (
    EngineFailed,
    EngineLost,
    EngineRecovered,
    EngineStalled,
    EngineStart,
    FromEngine,
    Pulse,
    StartFailed,
)
from tokenmill_engine.ipc.exits import describe_exit
from tokenmill_engine.ipc.sockets import local_endpoints
from tokenmill_engine.messages import Endpoints, EngineReady
from tokenmill_server.children import stop_children, watch_child
from tokenmill_server.config import FaultConfig
from tokenmill_server.engine_table import ProcessUpdate
from tokenmill_server.liveness import Liveness
from tokenmill_server.stalls import StallDetector
from tokenmill_server.watcher import Exited, Said, Watcher

logger = logging.getLogger(__name__)

_ENGINE_MODULE = "tokenmill_engine.process"
_FORGIVEN_AFTER_S = 600.0
_MAX_BACKOFF_S = 30.0


@dataclass(slots=True)
class _Rank:
    """One rank of this machine and its process."""

    number: int
    environment: Mapping[str, str]
    incarnation: int = 0
    child: ChildProcess[FromEngine] | None = None
    ready_since: float | None = None
    failure: str | None = None
    """Why this incarnation could not start, or go on, in its own words."""
    is_lost: bool = False
    """This incarnation was killed because it hung, and has been told of; its process may take long to end."""
    num_deaths: int = 0
    """Since it last served for long."""
    restart_at: float | None = None


class EngineSupervisor:
    """The engine cores of this machine. Their keys in the watcher are `("engine", rank)`."""

    def __init__(
        self,
        run_dir: str,
        watcher: Watcher,
        began: float,
        bind: Callable[[int, int], Endpoints] | None = None,
        removes_run_dir: bool = False,
    ) -> None:
        """`began`: the monotonic clock when the user's command, or call, began. `bind`: where an engine core of this
        rank and incarnation binds its sockets; in `run_dir` if nothing is said. `removes_run_dir`: engine cores
        remove it if this process is killed, because nobody else would."""
        self._run_dir = run_dir
        self._removes_run_dir = removes_run_dir
        self._watcher = watcher
        self._began = began
        self._bind = bind or (lambda rank, incarnation: local_endpoints(run_dir, rank, incarnation))
        self._device = "auto"
        self._num_workers = 0
        self._segments: Sequence[int] = ()
        self._ranks: dict[int, _Rank] = {}
        self._config: EngineConfig | None = None
        self._max_restarts = 0
        self._liveness = Liveness(gives_up=False)
        self._stalls = StallDetector(0.0)

    def spawn(
        self,
        num_engines: int,
        device: str,
        environment: Mapping[str, str],
        *,
        first_rank: int = 0,
        num_workers: int = 0,
        segments: Sequence[int] = (),
    ) -> None:
        """Starts the processes of all engine cores: they import what takes seconds, and wait to be configured.
        `device` is what the user asked for: auto, cpu or cuda. `num_workers`: processes that each of them starts at
        once to compute; 0: it computes itself, or knows only when it is configured that it does not. `segments`:
        descriptors of memory that API servers share with it, by their numbers; the caller's, who keeps them open.

        Raises:
            StartupError: the machine does not let us start so many.
        """
        self._device = device
        self._num_workers = num_workers
        self._segments = segments
        for index in range(num_engines):
            seen = _engine_environment(environment, device, num_engines, index, max(1, num_workers))
            rank = _Rank(first_rank + index, seen)
            self._ranks[rank.number] = rank
            try:
                self._spawn(rank)
            except OSError as error:
                raise StartupError(f"{self._name(rank)} could not be started: {error}") from error

    def configure(self, config: EngineConfig, faults: FaultConfig | None = None) -> None:
        """Tells every engine core what to be; they load in parallel. `spawn` started as many as `config` says. Without
        `faults` nothing is restarted, and who calls this does not `tick`."""
        self._config = config
        if faults is not None:
            self._max_restarts = faults.max_engine_restarts
            self._stalls = StallDetector(faults.engine_stall_timeout_s)
            self._liveness.gives_up = faults.engine_stall_timeout_s > 0
        for rank in self._ranks.values():
            self._configure(rank, config, self._began)

    def has(self, engine: int) -> bool:
        """Whether this engine core is one of this machine's."""
        return engine in self._ranks

    def handle(self, event: Said | Exited) -> ProcessUpdate | None:
        """Takes note of an event about an engine core; returns what it changes for others.

        Raises:
            StartupError: an engine core could not start for the first time; the message is its own where it had one.
        """
        rank = self._ranks[event.key[1]]
        match event:
            case Said() if rank.is_lost:
                return None
            case Said(message=EngineReady() as ready):
                rank.ready_since = time.monotonic()
                self._liveness.expect_answers(event.key)
                self._stalls.heard(rank.number, Pulse(), self._liveness.now)
                return ready
            case Said(message=Pulse() as pulse):
                self._liveness.answered(event.key)
                if self._stalls.heard(rank.number, pulse, self._liveness.now):
                    return EngineRecovered(rank.number, rank.incarnation)
            case Said(message=StartFailed(message=message)):
                if rank.incarnation == 0:
                    raise StartupError(message)
                rank.failure = message
            case Said(message=EngineFailed(message=message)):
                rank.failure = message
            case Exited(returncode=returncode):
                return self._ended(rank, returncode)
        return None

    def tick(self) -> list[ProcessUpdate]:
        """To be called when `next_tick` has come, or more often: starts the engine cores again whose time it is, and
        looks for those that hang. Returns what changes for others.

        Raises:
            StartupError: an engine core hung when it started for the first time.
        """
        updates: list[ProcessUpdate] = []
        for rank in self._ranks.values():
            if rank.restart_at is not None and rank.restart_at <= time.monotonic():
                updates += self._restart(rank)
        for (_, number), fault in self._liveness.look():
            updates += self._kill(self._ranks[number], fault)
        now = self._liveness.now
        for number in self._stalls.hopeless(now):
            fault = f"had work but finished no step for {2 * self._stalls.timeout_s:g} s"
            updates += self._kill(self._ranks[number], fault)
        for number, since in self._stalls.newly_stalled(now):
            updates.append(EngineStalled(number, self._ranks[number].incarnation, since))
        return updates

    @property
    def next_tick(self) -> float:
        """When `tick` has something to do next, on the monotonic clock."""
        restarts = (rank.restart_at for rank in self._ranks.values() if rank.restart_at is not None)
        return min((self._liveness.next_look, *restarts))

    def end_restarts(self) -> None:
        """From now on nothing is started again."""
        self._max_restarts = 0
        for rank in self._ranks.values():
            rank.restart_at = None

    def stop(self) -> None:
        """Ends every engine core and waits for it. May be called twice."""
        self.end_restarts()
        stop_children(rank.child for rank in self._ranks.values() if rank.child is not None)
        for rank in self._ranks.values():
            rank.child = None

    def _restart(self, rank: _Rank) -> list[ProcessUpdate]:
        """Returns its loss if the machine does not let us start it now; that is one more death."""
        assert self._config is not None
        rank.restart_at = None
        rank.incarnation += 1
        try:
            self._spawn(rank)
        except OSError as error:
            lost = self._lose(rank, f"{self._name(rank)} could not be started: {error}")
            self._schedule_restart(rank)
            return [lost]
        self._configure(rank, self._config, time.monotonic())
        return []

    def _kill(self, rank: _Rank, fault: str) -> list[ProcessUpdate]:
        """Kills an engine core that hangs. It is lost at once: one that hangs in the kernel does not end."""
        if rank.child is None or rank.is_lost:
            return []
        rank.is_lost = True
        os.killpg(rank.child.process.pid, signal.SIGKILL)
        return [self._lose(rank, rank.failure or f"{self._name(rank)} {fault} and was killed")]

    def _spawn(self, rank: _Rank) -> None:
        rank.ready_since = None
        rank.failure = None
        rank.is_lost = False
        child: ChildProcess[FromEngine] = spawn_child(
            _ENGINE_MODULE,
            FromEngine,
            args=[
                *("--run-dir", self._run_dir, "--device", self._device, "--workers", str(self._num_workers)),
                *(("--segments", *map(str, self._segments)) if self._segments else ()),
            ],
            pass_fds=self._segments,
            env=rank.environment,
        )
        watch_child(self._watcher, ("engine", rank.number), child)
        rank.child = child
        self._liveness.watch(("engine", rank.number), child.channel, child.process.pid)

    def _configure(self, rank: _Rank, config: EngineConfig, began: float) -> None:
        bind = self._bind(rank.number, rank.incarnation)
        start = EngineStart(
            rank.number,
            rank.incarnation,
            self._run_dir,
            bind,
            config,
            began,
            removes_run_dir=self._removes_run_dir,
            gives_up=self._liveness.gives_up,
        )
        try:
            if rank.child is not None:
                rank.child.channel.send(start)
        except ChannelClosedError:
            logger.debug("engine core %d ended before it could be configured", rank.number)

    def _ended(self, rank: _Rank, returncode: int) -> EngineLost | None:
        rank.child = None
        lost = None
        if not rank.is_lost:
            moment = "" if rank.ready_since is not None else "while it was starting"
            savers = "--kv-cache-memory-bytes"
            if len(self._ranks) > 1:
                savers += " or --data-parallel-size"
            how = describe_exit(returncode, moment, savers)
            lost = self._lose(rank, rank.failure or f"{self._name(rank)} {how}")
        self._schedule_restart(rank)
        return lost

    def _lose(self, rank: _Rank, reason: str) -> EngineLost:
        """Counts a death; the process need not be gone yet."""
        self._liveness.forget(("engine", rank.number))
        self._stalls.forget(rank.number)
        served_since = rank.ready_since
        if served_since is None and rank.incarnation == 0:
            raise StartupError(reason)
        if served_since is not None and time.monotonic() - served_since >= _FORGIVEN_AFTER_S:
            rank.num_deaths = 0
        rank.num_deaths += 1
        return EngineLost(rank.number, rank.incarnation, reason, self._restarts(rank))

    def _schedule_restart(self, rank: _Rank) -> None:
        if self._restarts(rank):
            rank.restart_at = time.monotonic() + _backoff_s(rank.num_deaths)

    def _restarts(self, rank: _Rank) -> bool:
        return rank.num_deaths <= self._max_restarts

    def _name(self, rank: _Rank) -> str:
        return f"engine core {rank.number if self._config is None else self._config.rank_of(rank.number)}"


def _backoff_s(num_deaths: int) -> float:
    """At once the first time, then 1, 2, 4, ... seconds."""
    return min(_MAX_BACKOFF_S, 2.0 ** (num_deaths - 2)) if num_deaths > 1 else 0.0


def _engine_environment(
    environment: Mapping[str, str], device: str, num_engines: int, index: int, num_gpus: int
) -> dict[str, str]:
    """Engine core `index` of several on one machine that may use GPUs sees only its own `num_gpus` of the visible ones,
    if there are so many. Where all are hidden, by a variable that is set but empty, they stay hidden."""
    result = dict(environment)
    if device != "cpu" and num_engines > 1:
        own = range(index * num_gpus, (index + 1) * num_gpus)
        names = environment.get("CUDA_VISIBLE_DEVICES")
        visible = list(map(str, range(own.stop))) if names is None else [name for name in names.split(",") if name]
        result["CUDA_VISIBLE_DEVICES"] = ",".join(visible[own.start : own.stop])
    return result
