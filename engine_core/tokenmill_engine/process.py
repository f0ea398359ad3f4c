"""The engine core's process, `python -m tokenmill_engine.process`; `ipc.child` and `main` say with which arguments.

The main thread runs the busy loop and sleeps when there is nothing to do. One thread receives, one sends; neither
ever makes the loop wait. The launcher decides when the process ends: END_SIGNAL means that nobody needs it any more.
"""

import argparse
import contextlib
import dataclasses
import gc
import logging
import os
import signal
import time
from types import FrameType
from typing import NoReturn

import zmq

from tokenmill_engine.engine import EngineCore
from tokenmill_engine.errors import EngineDeadError, TokenmillError, describe_os_error
from tokenmill_engine.ipc.channel import ChannelClosedError, ControlChannel
from tokenmill_engine.ipc.control import EngineControl, EngineFailed, EngineStart, FromEngine, StartFailed
from tokenmill_engine.ipc.free_memory import return_free_memory
from tokenmill_engine.ipc.heartbeat import Heartbeat
from tokenmill_engine.ipc.lifecycle import become_child, exit_at_once, exit_orphaned, exit_terminated, watch_parent
from tokenmill_engine.ipc.logs import configure_logging
from tokenmill_engine.ipc.signals import END_SIGNAL
from tokenmill_engine.ipc.sockets import public_key
from tokenmill_engine.mailboxes import Inbox, Outbox
from tokenmill_engine.messages import ClientGone, Endpoints, EngineReady, ReportsMissed
from tokenmill_engine.preparation import Preparation

logger = logging.getLogger("tokenmill_engine.process")  # the module itself runs as `__main__`


class EngineProcess:
    """A started engine core and its sockets."""

    def __init__(
        self, start: EngineStart, preparation: Preparation, phases: dict[str, float], heartbeat: Heartbeat
    ) -> None:
        """`phases`: seconds of what came before.

        Raises:
            TokenmillError: it cannot start.
        """
        self._observability = start.config.observability
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.inbox = Inbox(context, start.bind.input, start.bind.key)
        self._outbox = Outbox(
            context,
            start.bind.output,
            on_lost=lambda client, incarnation: self.inbox.put(ClientGone(client, incarnation)),
            on_missed=lambda client, incarnation: self.inbox.put(ReportsMissed(client, incarnation)),
            secret_key=start.bind.key,
        )
        executor, capacity = preparation.start_executor(start, on_lost=self.inbox.fail)
        capacity = dataclasses.replace(capacity, phases=phases | capacity.phases)
        self._core = EngineCore(start.config, executor, capacity, start.engine, start.began, self.inbox.wake)
        self._heartbeat = heartbeat
        heartbeat.has_work = lambda: self._core.has_work or not self.inbox.is_empty
        self.ready = EngineReady(
            engine=start.engine,
            incarnation=start.incarnation,
            endpoints=Endpoints(self.inbox.endpoint, self._outbox.endpoint, public_key(start.bind.key)),
            max_model_len=capacity.max_model_len,
            num_gpu_blocks=capacity.num_blocks,
            block_size=capacity.block_size,
            kv_cache_tokens=capacity.num_blocks // len(capacity.groups) * capacity.block_size,
            attention_backend=capacity.attention_backend,
            startup_s=capacity.phases,
            num_segments=preparation.num_segments,
        )

    def run(self) -> None:
        """Serve until `inbox.stop`.

        Raises:
            EngineDeadError: the device, or a worker, is lost.
        """
        self.inbox.start()
        self._outbox.start()
        interval_s = self._observability.stats_interval_s if self._observability.log_stats else None
        next_stats = time.monotonic() + (interval_s or 0.0)
        while True:
            timeout_s = max(0.0, next_stats - time.monotonic()) if interval_s is not None else None
            if not self.inbox.drain(self._core.handle, wait=not self._core.has_work, timeout_s=timeout_s):
                break
            self._outbox.put(self._core.step())
            self._heartbeat.num_turns += 1
            if interval_s is not None and time.monotonic() >= next_stats:
                self._core.log_stats()
                next_stats += interval_s
        self._core.shutdown()


def main() -> NoReturn:
    began = time.monotonic()
    parser = argparse.ArgumentParser()
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--workers", type=int, default=0, help="processes that compute; 0: this one")
    parser.add_argument("--segments", type=int, nargs="*", default=[], help="descriptors of memory with media in it")
    args = parser.parse_args()
    channel: ControlChannel[EngineControl] = ControlChannel.from_fd(args.control_fd, EngineControl)
    # Until there are API servers nobody else removes the run directory of a launcher that is killed.
    signal.signal(END_SIGNAL, lambda _number, _frame: exit_terminated(channel, args.run_dir))
    become_child("engine core", args.parent_pid, END_SIGNAL, args.run_dir)
    preparation = Preparation(may_use_gpu=args.device != "cpu", num_workers=args.workers, segments=args.segments)
    try:
        start = channel.receive()
    except ChannelClosedError:
        exit_orphaned(args.run_dir)
    if not isinstance(start, EngineStart):
        raise TypeError(f"the first message must be EngineStart, not {type(start).__name__}")
    configured = time.monotonic()
    name = f"engine core {start.config.rank_of(start.engine)}"
    if start.removes_run_dir:
        become_child(name, args.parent_pid, END_SIGNAL, args.run_dir)
    else:
        signal.signal(END_SIGNAL, _exit_on_signal)
        become_child(name, args.parent_pid)
    configure_logging(start.config.observability.log_level, name)
    heartbeat = Heartbeat(channel)
    watch_parent(channel, heartbeat.answer, start.run_dir)
    phases = {"launch": began - start.began, "configure": configured - began}
    try:
        process = EngineProcess(start, preparation, phases, heartbeat)
    except TokenmillError as error:
        _fail_start(channel, start, error.message)
    except Exception as error:
        if not os.path.isdir(start.run_dir):
            _fail_start(channel, start, f"{name} cannot start: the folder {start.run_dir} was removed")
        if isinstance(error, OSError | zmq.ZMQError):
            _fail_start(channel, start, f"{name} cannot start: {describe_os_error(error)}")
        logger.exception("%s cannot start", name)
        _fail_start(channel, start, f"{name} cannot start: {type(error).__name__}: {error}")
    if not start.removes_run_dir:
        signal.signal(END_SIGNAL, lambda _number, _frame: process.inbox.stop())
    # What exists now lives as long as the process: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    return_free_memory()
    _tell_launcher(channel, start, process.ready)
    try:
        process.run()
    except Exception as error:
        _fail(channel, name, error)
    exit_at_once(0)


def _fail(channel: ControlChannel[EngineControl], name: str, error: Exception) -> NoReturn:
    """The end of an engine core that cannot go on. What a worker process did needs no traceback of ours."""
    is_elsewhere = isinstance(error, EngineDeadError) and error.__cause__ is None
    if not is_elsewhere:
        logger.exception("%s failed", name, exc_info=error)
    logger.critical("%s is lost: %s", name, error)
    if isinstance(error, EngineDeadError):
        with contextlib.suppress(ChannelClosedError):
            channel.send(EngineFailed(" ".join(f"{name} is lost: {error.message}".split())))
    exit_at_once(1)


def _tell_launcher(channel: ControlChannel[EngineControl], start: EngineStart, message: FromEngine) -> None:
    """How the start went. A launcher that is gone wants no engine core any more."""
    try:
        channel.send(message)
    except ChannelClosedError:
        exit_orphaned(start.run_dir)


def _fail_start(channel: ControlChannel[EngineControl], start: EngineStart, message: str) -> NoReturn:
    _tell_launcher(channel, start, StartFailed(" ".join(message.split())))
    exit_at_once(1)


def _exit_on_signal(_number: int, _frame: FrameType | None) -> None:
    exit_at_once(0)


if __name__ == "__main__":
    main()
