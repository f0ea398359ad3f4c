"""Starts, watches and stops engine cores. Shared by the launcher and `LLM`; knows nothing of HTTP."""

import logging
import os
import signal
import time
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import zmq

from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.errors import EngineDeadError, StartupError
from tokenmill_engine.ipc.channel import ChannelClosedError
from tokenmill_engine.ipc.child import ChildProcess, spawn_child
from tokenmill_engine.ipc.control import EngineStart, FromEngine, StartFailed
from tokenmill_engine.ipc.ids import LAUNCHER_IDENTITY
from tokenmill_engine.ipc.sockets import connect_dealer, input_endpoint
from tokenmill_engine.messages import ClientGone, EngineReady
from tokenmill_server.watcher import Exited, Said, Watcher

logger = logging.getLogger(__name__)

_ENGINE_MODULE = "tokenmill_engine.process"
_TERMINATE_GRACE_S = 1.0
_STOP_POLL_S = 0.01


class EngineSupervisor:
    """All engine cores of one server. Their keys in the watcher are `("engine", rank)`."""

    def __init__(self, run_dir: str, watcher: Watcher, began: float) -> None:
        """`began`: the monotonic clock when the user's command, or call, began."""
        self._run_dir = run_dir
        self._watcher = watcher
        self._began = began
        self._num_engines = 0
        self._children: dict[int, ChildProcess[FromEngine]] = {}
        self._ready: dict[int, EngineReady] = {}
        self._zmq: zmq.Context[zmq.Socket[bytes]] | None = None
        self._inputs: list[zmq.Socket[bytes]] = []

    def spawn(self, num_engines: int, device: str, environment: Mapping[str, str]) -> None:
        """Starts the processes of all engine cores: they import what takes seconds, and wait to be configured.
        `device` is what the user asked for: auto, cpu or cuda."""
        self._num_engines = num_engines
        for rank in range(num_engines):
            child: ChildProcess[FromEngine] = spawn_child(
                _ENGINE_MODULE,
                FromEngine,
                args=["--run-dir", self._run_dir, "--device", device],
                env=_engine_environment(environment, device, num_engines, rank),
            )
            self._children[rank] = child
            self._watcher.add(("engine", rank), child)

    def configure(self, config: EngineConfig) -> None:
        """Tells every engine core what to be; they load in parallel. `spawn` started as many as `config` says."""
        for rank, child in self._children.items():
            try:
                child.channel.send(EngineStart(rank, self._run_dir, config, self._began))
            except ChannelClosedError:
                logger.debug("engine core %d ended before it could be configured", rank)

    @property
    def ready(self) -> list[EngineReady]:
        """The engine cores that can serve, in the order of their ranks."""
        return [self._ready[rank] for rank in sorted(self._ready)]

    @property
    def all_ready(self) -> bool:
        return 0 < self._num_engines == len(self._ready)

    def handle(self, event: Said | Exited) -> None:
        """Takes note of an event about an engine core.

        Raises:
            StartupError: an engine core could not start; the message is its own where it had one.
            EngineDeadError: an engine core that was ready is gone.
        """
        match event:
            case Said(message=EngineReady() as ready):
                self._ready[ready.engine] = ready
            case Said(message=StartFailed(message=message)):
                raise StartupError(message)
            case Exited(key=(_, rank), returncode=returncode):
                self._children.pop(rank, None)
                reason = describe_exit(returncode)
                if self._ready.pop(rank, None) is None:
                    raise StartupError(f"engine core {rank} {reason} while it was starting")
                raise EngineDeadError(f"engine core {rank} {reason}")

    def client_gone(self, client: int, incarnation: int) -> None:
        """Tells every engine core that this incarnation of API server `client` died, so that its requests end."""
        if self._zmq is None:
            self._zmq = zmq.Context()
            self._inputs = [
                connect_dealer(self._zmq, input_endpoint(self._run_dir, rank), LAUNCHER_IDENTITY)
                for rank in range(self._num_engines)
            ]
        frame = msgspec.msgpack.encode(ClientGone(client, incarnation))
        for socket in self._inputs:
            socket.send(frame)

    def stop(self) -> None:
        """Ends every engine core and waits for it. May be called twice."""
        stop_children(self._children.values())
        self._children.clear()
        if self._zmq is not None:
            self._zmq.destroy(linger=0)
            self._zmq = None


def stop_children(children: Iterable[ChildProcess[Any]]) -> None:
    """Tells each child to end, by SIGTERM and the end of its channel; a moment later kills it and whatever it
    started. Returns when all are reaped."""
    running = [child for child in children if child.process.returncode is None]
    processes = [child.process for child in running]
    for child in running:
        os.kill(child.process.pid, signal.SIGTERM)
        child.channel.close()
    deadline = time.monotonic() + _TERMINATE_GRACE_S
    while time.monotonic() < deadline and not all(_has_ended(process.pid) for process in processes):
        time.sleep(_STOP_POLL_S)
    for process in processes:
        # Not reaped yet, so the number still belongs to this child's process group.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _engine_environment(environment: Mapping[str, str], device: str, num_engines: int, rank: int) -> dict[str, str]:
    """Rank k of several that may use GPUs sees only the k-th visible one, if there are so many. Where all are hidden,
    by a variable that is set but empty, they stay hidden."""
    result = dict(environment)
    if device != "cpu" and num_engines > 1:
        names = environment.get("CUDA_VISIBLE_DEVICES")
        visible = None if names is None else [name for name in names.split(",") if name]
        if visible is None:
            result["CUDA_VISIBLE_DEVICES"] = str(rank)
        else:
            result["CUDA_VISIBLE_DEVICES"] = visible[rank] if rank < len(visible) else ""
    return result


def describe_exit(returncode: int) -> str:
    """How a child ended, as the predicate of a sentence."""
    if returncode == -signal.SIGKILL:
        return (
            "was killed (SIGKILL); if the kernel did so for want of memory, lower --kv-cache-memory-bytes "
            "or --data-parallel-size"
        )
    if returncode < 0:
        return f"was ended by {signal.Signals(-returncode).name}"
    return f"exited with status {returncode}"
