"""The worker processes of one engine core: their start, the rings to and from them, their ends.

All are started at once, also before the configuration is known, by the main thread: the kernel ends them when the
thread that started them ends. Knows nothing of what plans and answers say.
"""

import contextlib
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.errors import StartupError, describe_os_error
from tokenmill_engine.ipc.channel import ChannelClosedError
from tokenmill_engine.ipc.child import ChildProcess, is_stopped, spawn_child
from tokenmill_engine.ipc.exits import describe_exit
from tokenmill_engine.ipc.lifecycle import die_with
from tokenmill_engine.ipc.shared_ring import RingFiles, RingReader, RingWriter, create_ring, wake_up
from tokenmill_engine.ipc.stopped import StoppedChildren
from tokenmill_engine.outputs import KVCapacity
from tokenmill_engine.worker.control import FromWorker, RefusedAlike, WorkerFailed, WorkerReady, WorkerStart

logger = logging.getLogger(__name__)

_MODULE = "tokenmill_engine.worker.process"
_PLANS_BYTES = 4 << 20
"""More than a step's plan, unless it has more than a million prompt tokens."""
_ANSWERS_BYTES = 1 << 20
"""Of each worker: which one sends results is not known yet. What is not written takes no memory."""
_GRACE_S = 0.5
"""Between the first failure of a start and the one that counts: another may have been first."""
_PATIENCE_S = 60.0
"""How long a start may go on without a sign of any worker before that is worth a warning, and before the next one."""
_END_S = 0.5
"""How long workers get to end by themselves; the engine core itself gets a second."""


@dataclass(slots=True, frozen=True)
class _Exit:
    """A worker's process has ended."""

    returncode: int
    """Negative for a signal, as in `subprocess`."""


class WorkerPool:
    """`size` workers, by rank. The engine core's thread uses it; `lost` may be set in another one."""

    def __init__(
        self,
        size: int,
        patience_s: float = _PATIENCE_S,
        *,
        may_use_gpus: bool = False,
        segments: Sequence[int] = (),
    ) -> None:
        """Starts the processes, which import what they need and wait. Main thread only. `patience_s`: how long a start
        may go on without a sign of any worker before that is logged, and before it is logged again. `may_use_gpus`:
        each of them sets up a visible GPU of its own as well, that with its rank. `segments`: descriptors of memory
        that API servers share, the caller's, which they get too.

        Raises:
            StartupError: the machine does not let us start so many, or any.
        """
        if sys.platform != "linux":
            raise StartupError("worker processes need Linux; use --distributed-executor-backend uni")
        self.size = size
        self._patience_s = patience_s
        self._may_use_gpus = may_use_gpus
        self._segments = segments
        self.lost: str | None = None
        """Once set: a worker that was ready has ended, or is stopped for long, and how. A wake-up of who waits for
        answers follows."""
        self.lost_at = 0.0
        """When that was noticed, of the monotonic clock."""
        self.gives_up = True
        """False: a worker may be stopped for ever, as under a debugger. Set before `start`."""
        self._has_lost = threading.Event()
        self._names = [f"worker {rank}" for rank in range(size)]
        self._children: list[ChildProcess[FromWorker]] = []
        self._open = contextlib.ExitStack()
        self._watcher: threading.Thread | None = None
        self._is_stopping = threading.Event()
        self._is_ending = False
        """Workers were told to end."""
        try:
            self._make_rings()
            self._selector = self._open.enter_context(selectors.DefaultSelector())
            self._stop_fd = self._own_fd(os.eventfd(0, os.EFD_CLOEXEC))
            self._selector.register(self._stop_fd, selectors.EVENT_READ)
            for rank in range(size):
                self._spawn(rank)
        except OSError as error:
            self.stop()
            raise StartupError(f"{size} workers cannot be started: {describe_os_error(error)}") from error

    def start(self, config: EngineConfig, engine_rank: int, store_path: str) -> list[KVCapacity]:
        """Tells the workers what to be; returns what each offers, once all are ready.

        Raises:
            StartupError: one could not start, or is stopped for long if the pool `gives_up`; says why, of the one that
                failed first.
        """
        self._names = [f"worker {engine_rank}.{rank}" for rank in range(self.size)]
        start = WorkerStart(engine_rank, store_path, config)
        for child in self._children:
            with contextlib.suppress(ChannelClosedError):  # its end is noticed below
                child.channel.send(start)
        ready: dict[int, KVCapacity] = {}
        failures: dict[int, tuple[float, str]] = {}
        began = time.monotonic()
        warning_at = began + self._patience_s
        deadline: float | None = None
        children = self._stopped_children()
        while failures or len(ready) < self.size:
            for rank, event in self._wait(min(deadline or warning_at, children.next_look or warning_at)):
                warning_at = time.monotonic() + self._patience_s
                match event:
                    case WorkerReady(capacity=capacity):
                        ready[rank] = capacity
                    case WorkerFailed(message=message, at=at):
                        failures[rank] = at, message
                    case _Exit(returncode=returncode) if rank not in failures:
                        # No error of another worker makes one be killed, but the other way round.
                        at = 0.0 if returncode == -signal.SIGKILL else time.monotonic()
                        how = describe_exit(returncode, "while it was starting")
                        failures[rank] = at, f"{self._names[rank]} {how}"
            for rank, fault in children.look():  # the others would wait for it
                failures.setdefault(rank, (0.0, f"{self._names[rank]} {fault} while it was starting"))
            if failures:
                deadline = deadline or time.monotonic() + _GRACE_S
                if len(failures) == self.size or time.monotonic() >= deadline:
                    raise StartupError(min(failures.values())[1])
            elif time.monotonic() >= warning_at:
                self._warn_of_late([rank for rank in range(self.size) if rank not in ready], time.monotonic() - began)
                warning_at = time.monotonic() + self._patience_s
        return [ready[rank] for rank in range(self.size)]

    def _stopped_children(self) -> StoppedChildren:
        return StoppedChildren([child.process.pid for child in self._children] if self.gives_up else [])

    def _warn_of_late(self, ranks: list[int], waited_s: float) -> None:
        """Nothing else would tell of a worker that is stopped or hangs: the others wait for it."""
        names = ", ".join(
            self._names[rank] + (" (stopped)" if is_stopped(self._children[rank].process.pid, or_traced=True) else "")
            for rank in ranks
        )
        logger.warning("the start has waited %.0f s; not ready: %s", waited_s, names)

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """From now on, a worker's end sets `lost`, wakes the thread that waits for answers and calls `on_lost` in a
        thread of the pool's own; that only before `expect_ends`. So does a worker that is stopped for long, if the pool
        `gives_up`. If that thread fails, so does this process."""

        def watch() -> None:
            children = self._stopped_children()
            while not self._is_stopping.is_set():
                for rank, event in self._wait(children.next_look):
                    if isinstance(event, _Exit):
                        self._lose(rank, describe_exit(event.returncode), on_lost)
                for rank, fault in children.look():
                    self._lose(rank, fault, on_lost)

        self._watcher = threading.Thread(target=die_with, args=(watch,), name="worker-watcher", daemon=True)
        self._watcher.start()

    def _lose(self, rank: int, how: str, on_lost: Callable[[str], None]) -> None:
        if self.lost is not None or self._is_stopping.is_set():
            return
        self.lost_at = time.monotonic()
        self.lost = f"{self._names[rank]} {how}"
        self._has_lost.set()
        wake_up(self.wake)
        if not self._is_ending:
            on_lost(self.lost)

    def go_on(self, ranks: Iterable[int]) -> None:
        """Tells workers, each of which waits after a failure, that it was alike for all."""
        for rank in ranks:
            with contextlib.suppress(ChannelClosedError):  # its end is noticed elsewhere
                self._children[rank].channel.send(RefusedAlike())

    def expect_ends(self) -> None:
        """Workers are about to be told to end: nobody loses anything by it."""
        self._is_ending = True

    def wait_for_loss(self, timeout_s: float) -> None:
        """Until `lost` is set, if that is about to be."""
        self._has_lost.wait(timeout_s)

    def name(self, rank: int) -> str:
        """As titles and logs have it."""
        return self._names[rank]

    def stop(self, gently: bool = False) -> None:
        """Ends the workers and waits for that; `gently` after they were told to end. May be called twice."""
        self._is_stopping.set()
        if self._watcher is not None:
            wake_up(self._stop_fd)
            self._watcher.join()
            self._watcher = None
        deadline = time.monotonic() + (_END_S if gently else 0.0)
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
        for child in self._children:
            child.process.kill()
        for child in self._children:
            child.process.wait()
            child.channel.close()
        self._children.clear()
        self._open.close()

    def _make_rings(self) -> None:
        plans = self._own(create_ring(self.size, _PLANS_BYTES))
        self.plans = RingWriter(plans.memory, plans.wakes, plans.space)
        self._open.callback(self.plans.close)
        self.space = plans.space
        """The eventfd of who has plans to write."""
        self.wake = self._own_fd(os.eventfd(0, os.EFD_CLOEXEC))
        """The eventfd of who waits for answers."""
        self.answers: list[RingReader] = []
        """One of each rank."""
        self._worker_fds: list[tuple[tuple[int, int, int], tuple[int, int, int]]] = []
        for rank in range(self.size):
            answers = self._own(create_ring(1, _ANSWERS_BYTES, self.wake))
            self.answers.append(RingReader(*answers.of_reader(0)))
            self._open.callback(self.answers[rank].close)
            self._worker_fds.append((plans.of_reader(rank), answers.of_reader(0)))

    def _spawn(self, rank: int) -> None:
        plans, answers = self._worker_fds[rank]
        child: ChildProcess[FromWorker] = spawn_child(
            _MODULE,
            FromWorker,
            args=[
                *("--rank", str(rank), "--size", str(self.size)),
                *("--plans", *map(str, plans), "--answers", *map(str, answers)),
                *(("--gpu",) if self._may_use_gpus else ()),
                *(("--segments", *map(str, self._segments)) if self._segments else ()),
            ],
            pass_fds=(*plans, *answers, *self._segments),
        )
        self._children.append(child)
        pidfd = self._own_fd(os.pidfd_open(child.process.pid))
        self._selector.register(pidfd, selectors.EVENT_READ, (rank, "end"))
        self._selector.register(child.channel, selectors.EVENT_READ, (rank, "channel"))

    def _wait(self, deadline: float | None) -> Iterator[tuple[int, WorkerReady | WorkerFailed | _Exit]]:
        """What workers say until one says something, and which ones end; nothing once the pool is to stop."""
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        ended: list[tuple[int, Any]] = []
        for key, _ in self._selector.select(timeout):
            if key.fd == self._stop_fd:
                continue
            rank, kind = key.data
            if kind == "end":
                ended.append((rank, key.fileobj))
            else:
                yield from self._messages(rank)
        for rank, pidfd in ended:
            yield from self._messages(rank)
            self._selector.unregister(pidfd)
            yield rank, _Exit(self._children[rank].process.wait())

    def _messages(self, rank: int) -> Iterator[tuple[int, FromWorker]]:
        channel = self._children[rank].channel
        try:
            for message in channel.receive_available():
                yield rank, message
        except ChannelClosedError:
            if channel in self._selector.get_map():
                self._selector.unregister(channel)

    def _own(self, ring: RingFiles) -> RingFiles:
        self._open.callback(ring.close)
        return ring

    def _own_fd(self, fd: int) -> int:
        self._open.callback(os.close, fd)
        return fd
