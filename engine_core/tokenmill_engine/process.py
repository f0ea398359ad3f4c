"""The engine core's process, `python -m tokenmill_engine.process`; `ipc.child` and `main` say with which arguments.

The main thread runs the busy loop and sleeps when there is nothing to do. One thread receives, one sends; neither
ever makes the loop wait. The launcher decides when the process ends: SIGTERM means that nobody needs it any more.
"""

import argparse
import contextlib
import dataclasses
import gc
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

import msgspec
import zmq

from tokenmill_engine.engine import EngineCore, Output
from tokenmill_engine.errors import TokenmillError, describe_os_error
from tokenmill_engine.ipc.channel import ChannelClosedError, ControlChannel
from tokenmill_engine.ipc.control import EngineControl, EngineStart, StartFailed
from tokenmill_engine.ipc.ids import client_identity, incarnation_of
from tokenmill_engine.ipc.lifecycle import become_child, exit_orphaned, exit_terminated, watch_parent
from tokenmill_engine.ipc.logs import configure_logging
from tokenmill_engine.ipc.sockets import bind_router, bound_endpoint
from tokenmill_engine.messages import (
    BlockEvents,
    ClientGone,
    ClientMessage,
    Endpoints,
    EngineMessage,
    EngineReady,
    LoadReport,
)
from tokenmill_engine.preparation import Preparation

logger = logging.getLogger("tokenmill_engine.process")  # the module itself runs as `__main__`

_KEEP_S = 1.0
"""How long messages to an API server that is not connected are kept."""
_RETRY_S = 0.001
_HANDLE_S = 0.005
"""How long messages may keep the loop from its next step; those that are left wait for the turn after it."""


class Inbox:
    """Client messages, received by a thread of its own. None in the queue wakes up who waits for one."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> None:
        self._socket = bind_router(context, endpoint)
        self.endpoint = bound_endpoint(self._socket)
        self._decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
        self._messages: queue.SimpleQueue[ClientMessage | None] = queue.SimpleQueue()
        self._stopped = False

    def start(self) -> None:
        threading.Thread(target=_die_with, args=(self._receive,), name="inbox", daemon=True).start()

    def stop(self) -> None:
        """Make `drain` return False. Safe in a signal handler."""
        self._stopped = True
        self._messages.put(None)

    def put(self, message: ClientMessage) -> None:
        """Queue a message that no client sent."""
        self._messages.put(message)

    def drain(self, handle: Callable[[ClientMessage], None], wait: bool, timeout_s: float | None) -> bool:
        """Handle what has arrived, in order, for a few milliseconds at most; if nothing has and `wait`, what arrives
        first within `timeout_s` seconds (None: ever). False: stop."""
        try:
            message = self._messages.get(block=wait, timeout=timeout_s)
            deadline = time.monotonic() + _HANDLE_S
            while not self._stopped:
                if message is not None:
                    handle(message)
                if time.monotonic() >= deadline:
                    return True
                message = self._messages.get(block=False)
        except queue.Empty:
            pass
        return not self._stopped

    def _receive(self) -> None:
        while True:
            _, frame = self._socket.recv_multipart()
            try:
                self._messages.put(self._decoder.decode(frame))
            except msgspec.MsgspecError as error:
                logger.error("a client sent something that is no message of ours; it is dropped: %s", error)


class Outbox:
    """Engine messages, encoded and sent by a thread of its own.

    What goes to an API server that is not connected is kept for a moment: a restarted one may be heard on the inbox
    before its connection to this socket is complete. After that it is given up, and `on_lost` is called with it and
    its incarnation; what is for a successor stays.
    """

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, on_lost: Callable[[int, int], None]
    ) -> None:
        self._socket = bind_router(context, endpoint, mandatory=True)
        self.endpoint = bound_endpoint(self._socket)
        self._on_lost = on_lost
        self._encoder = msgspec.msgpack.Encoder()
        self._outputs: queue.SimpleQueue[list[Output]] = queue.SimpleQueue()
        self._kept: dict[int, deque[_Kept]] = {}
        """By API server."""

    def start(self) -> None:
        threading.Thread(target=_die_with, args=(self._send,), name="outbox", daemon=True).start()

    def put(self, outputs: list[Output]) -> None:
        if outputs:
            self._outputs.put(outputs)

    def _send(self) -> None:
        while True:
            try:
                outputs = self._outputs.get(timeout=_RETRY_S if self._kept else None)
            except queue.Empty:
                outputs = []
            for client, message in outputs:
                frame = self._encoder.encode(message)
                if client in self._kept or not self._send_one(client, frame):
                    kept = _Kept(frame, _incarnation_addressed(message), time.monotonic() + _KEEP_S)
                    self._kept.setdefault(client, deque()).append(kept)
            for client in list(self._kept):
                self._retry(client)

    def _retry(self, client: int) -> None:
        """Send what was kept, in order; if the first was kept too long, drop all that is for the same incarnation."""
        kept = self._kept[client]
        while kept and self._send_one(client, kept[0].frame):
            kept.popleft()
        if kept and kept[0].deadline < time.monotonic():
            lost = kept[0].incarnation
            kept = self._kept[client] = deque(each for each in kept if each.incarnation != lost)
            logger.warning("API server %d is not connected; its requests are aborted", client)
            self._on_lost(client, lost)
        if not kept:
            del self._kept[client]

    def _send_one(self, client: int, frame: bytes) -> bool:
        """False if the client is not connected."""
        try:
            self._socket.send_multipart([client_identity(client), frame])
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True


@dataclass(slots=True, frozen=True)
class _Kept:
    """An encoded message that could not be sent yet."""

    frame: bytes
    incarnation: int
    deadline: float
    """Of the monotonic clock, in seconds."""


def _incarnation_addressed(message: EngineMessage) -> int:
    """The incarnation of the API server that the message is for."""
    if isinstance(message, LoadReport | BlockEvents):
        return message.incarnation
    return incarnation_of(int.from_bytes(message.request_ids[:8], "little"))


class EngineProcess:
    """A started engine core and its sockets."""

    def __init__(self, start: EngineStart, preparation: Preparation, phases: dict[str, float]) -> None:
        """`phases`: seconds of what came before.

        Raises:
            TokenmillError: it cannot start.
        """
        self._observability = start.config.observability
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.inbox = Inbox(context, start.bind.input)
        self._outbox = Outbox(
            context,
            start.bind.output,
            on_lost=lambda client, incarnation: self.inbox.put(ClientGone(client, incarnation)),
        )
        executor, capacity = preparation.start_executor(start.config)
        capacity = dataclasses.replace(capacity, phases=phases | capacity.phases)
        self._core = EngineCore(start.config, executor, capacity, start.engine)
        self.ready = EngineReady(
            engine=start.engine,
            incarnation=start.incarnation,
            endpoints=Endpoints(self.inbox.endpoint, self._outbox.endpoint),
            max_model_len=capacity.max_model_len,
            num_gpu_blocks=capacity.num_blocks,
            block_size=capacity.block_size,
            kv_cache_tokens=capacity.num_blocks // len(capacity.groups) * capacity.block_size,
            attention_backend=capacity.attention_backend,
            startup_s=capacity.phases,
        )

    def run(self) -> None:
        """Serve until `inbox.stop`.

        Raises:
            EngineDeadError: the device is lost.
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
    args = parser.parse_args()
    channel: ControlChannel[EngineStart] = ControlChannel.from_fd(args.control_fd, EngineControl)
    # Until there are API servers nobody else removes the run directory of a launcher that is killed.
    signal.signal(signal.SIGTERM, lambda _number, _frame: exit_terminated(channel, args.run_dir))
    become_child("engine core", args.parent_pid, signal.SIGTERM, args.run_dir)
    preparation = Preparation(may_use_gpu=args.device != "cpu")
    try:
        start = channel.receive()
    except ChannelClosedError:
        exit_orphaned(args.run_dir)
    configured = time.monotonic()
    signal.signal(signal.SIGTERM, _exit_on_signal)
    name = f"engine core {start.engine}"
    become_child(name, args.parent_pid)
    configure_logging(start.config.observability.log_level, name)
    watch_parent(channel, _ignore, start.run_dir)
    phases = {"launch": began - start.began, "configure": configured - began}
    try:
        process = EngineProcess(start, preparation, phases)
    except TokenmillError as error:
        _fail_start(channel, error.message)
    except Exception as error:
        if not os.path.isdir(start.run_dir):
            _fail_start(channel, f"{name} cannot start: the folder {start.run_dir} was removed")
        if isinstance(error, OSError | zmq.ZMQError):
            _fail_start(channel, f"{name} cannot start: {describe_os_error(error)}")
        logger.exception("%s cannot start", name)
        _fail_start(channel, f"{name} cannot start: {type(error).__name__}: {error}")
    signal.signal(signal.SIGTERM, lambda _number, _frame: process.inbox.stop())
    # What exists now lives as long as the process: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    channel.send(process.ready)
    try:
        process.run()
    except Exception as error:
        logger.exception("%s failed", name)
        logger.critical("%s is lost: %s", name, error)
        _exit(1)
    _exit(0)


def _ignore(_message: EngineStart) -> None:
    """The launcher says nothing after the start; the channel stays open for its end of file."""


def _fail_start(channel: ControlChannel[EngineStart], message: str) -> NoReturn:
    channel.send(StartFailed(" ".join(message.split())))
    _exit(1)


def _die_with(work: Callable[[], None]) -> None:
    """Run a thread's work; the process is of no use without it."""
    try:
        work()
    except Exception:
        logger.exception("thread %s failed", threading.current_thread().name)
        _exit(1)


def _exit_on_signal(_number: int, _frame: FrameType | None) -> None:
    _exit(0)


def _exit(status: int) -> NoReturn:
    """End at once: the interpreter's orderly end would pull native code from under threads that are inside it."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # full, closed, not there
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
