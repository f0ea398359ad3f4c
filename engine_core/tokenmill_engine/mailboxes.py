"""The queues between an engine core's loop and its sockets. One thread receives, one sends; neither ever makes the
loop wait, and the process ends with either of them.
"""

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec
import zmq

from tokenmill_engine.ipc.frames import MessageDecoder, receive_frames
from tokenmill_engine.ipc.ids import client_identity, incarnation_of
from tokenmill_engine.ipc.lifecycle import die_with
from tokenmill_engine.ipc.sockets import bind_router, bound_endpoint
from tokenmill_engine.messages import (
    BlockEvents,
    ClientMessage,
    EngineMessage,
    LoadReport,
    MediaMissing,
    StepOutput,
)
from tokenmill_engine.reports import Output

logger = logging.getLogger(__name__)

_KEEP_S = 1.0
"""How long messages to an API server that is not connected are kept."""
_MAX_QUEUED = 1000
"""Messages on their way to one API server, beside what the operating system holds."""
_RETRY_S = 0.001
_FULL_RETRY_S = 0.02
_HANDLE_S, _HANDLE_SHARE = 0.005, 0.25
"""How long messages may keep the loop from its next step, or that share of what the last one took, if it is more; those
that are left wait for the turn after it. Where they wait, nobody counts them and no other may go first."""

OnClient = Callable[[int, int], None]
"""Called with an API server and its incarnation."""


class Inbox:
    """Client messages, received by a thread of its own. None in the queue wakes up who waits for one."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, secret_key: str = "") -> None:
        self._socket = bind_router(context, endpoint, secret_key=secret_key)
        self.endpoint = bound_endpoint(self._socket)
        self._decoder = MessageDecoder()
        self._messages: queue.SimpleQueue[ClientMessage | None] = queue.SimpleQueue()
        self._stopped = False
        self._error: Exception | None = None
        self._drained_at = math.inf

    def start(self) -> None:
        threading.Thread(target=die_with, args=(self._receive,), name="inbox", daemon=True).start()

    def stop(self) -> None:
        """Make `drain` return False. Safe in a signal handler."""
        self._stopped = True
        self._messages.put(None)

    def fail(self, error: Exception) -> None:
        """Make `drain` raise this. Safe in any thread."""
        self._error = error
        self._messages.put(None)

    def put(self, message: ClientMessage) -> None:
        """Queue a message that no client sent."""
        self._messages.put(message)

    def wake(self) -> None:
        """Make `drain` return. Safe in any thread."""
        self._messages.put(None)

    @property
    def is_empty(self) -> bool:
        """Whether everything that has arrived was handled, or is about to be."""
        return self._messages.empty()

    def drain(self, handle: Callable[[ClientMessage], None], wait: bool, timeout_s: float | None) -> bool:
        """Handle what has arrived, in order, for a few milliseconds, or a part of the time since the last call, at
        most; if nothing has and `wait`, what arrives first within `timeout_s` seconds (None: ever). False: stop. Raises
        what `fail` was given."""
        busy_s = 0.0 if wait else max(0.0, time.monotonic() - self._drained_at)
        try:
            message = self._messages.get(block=wait, timeout=timeout_s)
            deadline = time.monotonic() + max(_HANDLE_S, _HANDLE_SHARE * busy_s)
            while not self._stopped:
                if self._error is not None:
                    raise self._error
                if message is not None:
                    handle(message)
                if time.monotonic() >= deadline:
                    return True
                message = self._messages.get(block=False)
        except queue.Empty:
            pass
        finally:
            self._drained_at = time.monotonic()
        return not self._stopped

    def _receive(self) -> None:
        while True:
            _, *frames = receive_frames(self._socket)
            try:
                self._messages.put(self._decoder.decode(frames))
            except msgspec.MsgspecError as error:
                logger.error("a client sent something that is no message of ours; it is dropped: %s", error)


class Outbox:
    """Engine messages, encoded and sent by a thread of its own.

    What goes to an API server that is not connected is kept for a moment: a restarted one may be heard on the inbox
    before its connection to this socket is complete. After that it is given up, and `on_lost` is called with it; what
    is for a successor stays.

    One that is connected but takes nothing (it is stopped, or hangs) gets every output when it goes on: those are
    bounded by the requests it has sent. Reports have no bound; it is spared them, and `on_missed` is called with it
    once it has taken everything else.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        on_lost: OnClient,
        on_missed: OnClient,
        secret_key: str = "",
    ) -> None:
        self._socket = bind_router(context, endpoint, secret_key=secret_key, mandatory=True, max_queued=_MAX_QUEUED)
        self.endpoint = bound_endpoint(self._socket)
        self._on_lost = on_lost
        self._on_missed = on_missed
        self._encoder = msgspec.msgpack.Encoder()
        self._outputs: queue.SimpleQueue[list[Output]] = queue.SimpleQueue()
        self._backlogs: dict[int, _Backlog] = {}
        """By API server, of those that could not be sent something."""

    def start(self) -> None:
        threading.Thread(target=die_with, args=(self._send,), name="outbox", daemon=True).start()

    def put(self, outputs: list[Output]) -> None:
        if outputs:
            self._outputs.put(outputs)

    def _send(self) -> None:
        while True:
            try:
                outputs = self._outputs.get(timeout=self._retry_s())
            except queue.Empty:
                outputs = []
            for client, message in outputs:
                self._send_or_keep(client, message)
            for client in list(self._backlogs):
                self._retry(client)

    def _retry_s(self) -> float | None:
        """When to try again what could not be sent."""
        if not self._backlogs:
            return None
        return _FULL_RETRY_S if all(backlog.is_full for backlog in self._backlogs.values()) else _RETRY_S

    def _send_or_keep(self, client: int, message: EngineMessage) -> None:
        backlog = self._backlogs.get(client)
        if backlog is not None and backlog.is_full and isinstance(message, LoadReport | BlockEvents):
            backlog.missed = message.incarnation
            return
        frame = self._encoder.encode(message)
        if backlog is None:
            fate = self._send_one(client, frame)
            if fate is _Fate.SENT:
                return
            backlog = self._backlogs[client] = _Backlog(is_full=fate is _Fate.FULL)
        backlog.frames.append(_Kept(frame, _incarnation_addressed(message), time.monotonic() + _KEEP_S))

    def _retry(self, client: int) -> None:
        """Send what was kept, in order. If the client is not connected and the first was kept too long, drop all that
        is for the same incarnation."""
        backlog = self._backlogs[client]
        frames, fate = backlog.frames, _Fate.SENT
        while frames and (fate := self._send_one(client, frames[0].frame)) is _Fate.SENT:
            frames.popleft()
        backlog.is_full = fate is _Fate.FULL
        if fate is _Fate.UNREACHABLE and frames[0].deadline < time.monotonic():
            lost = frames[0].incarnation
            backlog.frames = frames = deque(each for each in frames if each.incarnation != lost)
            logger.warning("API server %d is not connected; its requests are aborted", client)
            self._on_lost(client, lost)
        if not frames:
            del self._backlogs[client]
            if backlog.missed is not None:
                self._on_missed(client, backlog.missed)

    def _send_one(self, client: int, frame: bytes) -> "_Fate":
        try:
            self._socket.send_multipart([client_identity(client), frame], zmq.NOBLOCK)
        except zmq.Again:
            return _Fate.FULL
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return _Fate.UNREACHABLE
            raise
        return _Fate.SENT


class _Fate(Enum):
    """What became of a message."""

    SENT = auto()
    FULL = auto()
    """The client is connected and has not taken what was sent before."""
    UNREACHABLE = auto()


@dataclass(slots=True, frozen=True)
class _Kept:
    """An encoded message that could not be sent yet."""

    frame: bytes
    incarnation: int
    deadline: float
    """Of the monotonic clock, in seconds: when it is given up if the client is not connected."""


@dataclass(slots=True)
class _Backlog:
    """What could not be sent to one API server."""

    frames: deque[_Kept] = field(default_factory=deque)
    is_full: bool = False
    missed: int | None = None
    """The incarnation that was spared reports."""


def _incarnation_addressed(message: EngineMessage) -> int:
    """The incarnation of the API server that the message is for."""
    if isinstance(message, StepOutput):
        return incarnation_of(int.from_bytes(message.request_ids[:8], "little"))
    if isinstance(message, MediaMissing):
        return incarnation_of(message.request_ids[0])
    return message.incarnation
