"""The API server's end of the sockets to the engine cores. Moves messages; knows nothing of text or HTTP.

Sockets are read from the event loop through ZeroMQ's edge-triggered descriptor, without tasks or futures: one
callback per wake-up takes what has come, so the cost is per engine step and not per token.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import zmq

from tokenmill_engine.errors import EngineDeadError, EngineUnavailableError
from tokenmill_engine.ipc.control import EngineDraining, EngineLost, EngineRecovered, EngineStalled
from tokenmill_engine.ipc.frames import MessageEncoder, send_frames
from tokenmill_engine.ipc.ids import RequestIds, client_identity
from tokenmill_engine.ipc.sockets import connect_dealer, is_remote
from tokenmill_engine.messages import (
    AbortRequests,
    AddRequest,
    BlockEvents,
    ClientMessage,
    EngineMessage,
    EngineReady,
    FinishReason,
    Hello,
    LoadReport,
    MediaMissing,
    StepOutput,
)
from tokenmill_server.balancing.load_balancer import LoadBalancer
from tokenmill_server.balancing.prompt_blocks import PromptBlocks
from tokenmill_server.connection_watch import ConnectionWatch

OutputHandler = Callable[[StepOutput], None]

_CONNECT_TIMEOUT_S = 30.0
_MIN_POLL_S, _MAX_POLL_S = 0.001, 0.05
"""Between two looks whether a socket is connected: local ones are at once, others may not be for ever."""
_RETRY_AFTER_S = 1
_POLLIN, _POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)
"""Enumerations are slow to calculate with."""
_MAX_MESSAGES, _MAX_BYTES = 64, 2**20
"""That one wake-up hands out: an engine core which is faster than this process must not keep it from all else. Many
vectors are large."""


@dataclass(slots=True)
class _Link:
    """The sockets to one engine core."""

    input: "zmq.Socket[bytes]"
    output: "zmq.Socket[bytes]"
    incarnation: int
    """Of the engine core at their other end."""
    num_segments: int = 0
    """As in `EngineReady`."""
    watch: ConnectionWatch | None = None
    """Of an engine core on another machine: on this one only its death cuts a connection, and the launcher tells."""


@dataclass(frozen=True, slots=True)
class _Absence:
    """Why an engine core is not connected, and whether it is to be expected again soon."""

    reason: str
    comes_back: bool = True


class EngineClient:
    """Sends requests to engine cores and hands their outputs to `on_output`."""

    def __init__(
        self, client: int, incarnation: int, balancer: LoadBalancer, on_output: OutputHandler | None = None
    ) -> None:
        self.balancer = balancer
        self.on_output = on_output or _ignore
        self.on_media_missing: Callable[[MediaMissing], None] = _nothing_missing
        """Called when an engine core wants requests again, with the tensors of their media."""
        self.on_sent: Callable[[int, int], None] = _not_counted
        """Called with an engine core and the bytes of a message that was sent to it."""
        self.on_waking: Callable[[], None] = _nothing
        """Called before a wake-up hands out what has come."""
        self.on_drained: Callable[[], None] = _nothing
        """Called when a wake-up has handed out what had come."""
        self.on_connection_broken: Callable[[EngineReady], None] = _nobody_reconnects
        """Called when an engine core is not connected any more, though it may live: answers may have been lost, and it
        gets no requests until it is connected anew."""
        self._hello = Hello(client, incarnation)
        self._identity = client_identity(client)
        self._ids = RequestIds(client, incarnation)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.setsockopt(zmq.IMMEDIATE, 1)  # writable only once connected
        self._links: dict[int, _Link] = {}
        self._lost: dict[int, EngineLost] = {}
        """The last loss of each engine. An incarnation may be lost before this has connected to it."""
        self._absences: dict[int, _Absence] = {}
        """Of engines that were connected or lost, and are not there now, or not for new requests."""
        self._draining: dict[int, EngineDraining] = {}
        """Engines that get no new requests any more; their connections stay for those that are open."""
        self._closed = False
        self._encoder = MessageEncoder()
        self._decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def connect(self, ready: EngineReady) -> None:
        """Connects to one engine core, for the first time or to the next incarnation of one that is lost or drains.

        The output side is up before the input side begins: an engine must know this client before it answers it. From
        its greeting on, the engine reports its load also while this client has nothing there.

        Raises:
            EngineDeadError: it was lost, or is to take nothing new, already or meanwhile, or does not answer.
        """
        engine = ready.engine
        self._check_alive(ready)
        self.balancer.lost(engine)
        output = await self._connect(ready, ready.endpoints.output)
        try:
            entry = await self._connect(ready, ready.endpoints.input)
            link = _Link(entry, output, ready.incarnation, ready.num_segments)
        except BaseException:
            output.close()
            raise
        if is_remote(ready.endpoints):
            link.watch = ConnectionWatch((link.input, output), lambda: self._connection_broke(ready))
        self._loop = asyncio.get_running_loop()
        self._links[engine] = link
        if not self._send(engine, self._hello):
            self._close_link(engine)
            raise EngineDeadError(f"the engine at {ready.endpoints.input} went away at once")
        self._absences.pop(engine, None)
        self._draining.pop(engine, None)
        self.balancer.joined(engine, ready.kv_cache_tokens)
        self._loop.add_reader(_option(output, zmq.FD), self._read, engine)
        self._read(engine)

    def disconnect(self, lost: EngineLost) -> None:
        """From now on nothing is sent to an engine that is gone; whoever tries is told why. What it had sent is handed
        out first."""
        self._read_all(lost.engine)
        self._lost[lost.engine] = lost
        self._absences[lost.engine] = _Absence(lost.message, comes_back=lost.restarts)
        self._draining.pop(lost.engine, None)
        self.balancer.lost(lost.engine)
        if lost.engine in self._links:
            self._close_link(lost.engine)

    def drain(self, draining: EngineDraining) -> None:
        """From now on no new requests are sent to an engine; what is open there goes on."""
        self._draining[draining.engine] = draining
        self._absences[draining.engine] = _Absence(draining.message, comes_back=False)
        self.balancer.lost(draining.engine)

    def misses(self, ready: EngineReady) -> bool:
        """Whether this incarnation of an engine core is not connected, though nobody has said that it is lost."""
        return not (self._closed or self._loss_of(ready) is not None or ready.engine in self._links)

    def engine_stalls(self, change: EngineStalled | EngineRecovered) -> None:
        """A stalled engine gets no new requests while others are not stalled, until it recovers. Another incarnation
        than the connected one does not matter."""
        link = self._links.get(change.engine)
        if link is not None and link.incarnation == change.incarnation:
            self.balancer.set_stalled(change.engine, isinstance(change, EngineStalled))

    def close(self) -> None:
        """Closes the sockets. Engines hear nothing of it: abort open requests before."""
        self._closed = True
        for engine in list(self._links):
            self._close_link(engine)
        self._context.term()

    @property
    def num_taking(self) -> int:
        """Engine cores that are connected and get new requests."""
        return sum(map(self.balancer.takes_requests, self._links))

    def new_request_id(self) -> int:
        return self._ids.next()

    def choose_engine(self, prompt: PromptBlocks, pinned: int | None = None) -> int:
        """The engine core for a prompt.

        Raises:
            InvalidRequestError: there is no engine `pinned`.
            EngineUnavailableError: engine `pinned` is gone or not connected; it says when to try again, or that this
                is of no use. Or the last engines that are there finish what they have, and take nothing new.
            EngineDeadError: every engine is gone.
        """
        engine = self.balancer.choose(prompt, pinned)
        if engine in self._draining or (pinned is not None and self._links and engine not in self._links):
            absence = self._absence_of(engine)
            raise EngineUnavailableError(absence.reason, _RETRY_AFTER_S if absence.comes_back else None)
        self._check_connected(engine)
        return engine

    def add(self, engine: int, requests: Sequence[AddRequest], prompt: PromptBlocks) -> None:
        """Hands the sequences of a prompt to `engine`. Raises EngineDeadError if it is gone."""
        self.add_again(engine, requests)
        self.balancer.sent(engine, prompt)

    def add_again(self, engine: int, requests: Sequence[AddRequest]) -> None:
        """Hands sequences to `engine` that it had to give back. Raises EngineDeadError if it is gone."""
        self._check_connected(engine)
        for request in requests:
            if not self._send(engine, request):
                raise EngineDeadError(f"engine core {engine} is gone")

    def shares_memory(self, engine: int) -> bool:
        """Whether an engine core reads the memory that this API server shares, if it does."""
        link = self._links.get(engine)
        return link is not None and link.num_segments > self._hello.client

    def abort(self, engine: int, request_ids: list[int], reason: FinishReason) -> None:
        """Makes `engine` forget requests; no output of theirs follows."""
        if request_ids and engine in self._links:
            self._send(engine, AbortRequests(request_ids, reason))

    def _send(self, engine: int, message: ClientMessage) -> bool:
        """Whether the engine was there to take it: the queue has no limit, so a full one means no connection."""
        frames = self._encoder.encode(message)
        try:
            send_frames(self._links[engine].input, frames)
        except zmq.Again:
            return False
        self.on_sent(engine, sum(map(len, frames)))
        return True

    def _check_connected(self, engine: int) -> None:
        if engine not in self._links:
            raise EngineDeadError(self._absence_of(engine).reason)

    def _absence_of(self, engine: int) -> "_Absence":
        return self._absences.get(engine, _Absence("the engine is not connected yet"))

    def _loss_of(self, ready: EngineReady) -> EngineLost | None:
        """The loss of this incarnation of an engine core, if it is lost; or of a later one."""
        lost = self._lost.get(ready.engine)
        return None if lost is None or lost.incarnation < ready.incarnation else lost

    def _check_alive(self, ready: EngineReady) -> None:
        lost = self._loss_of(ready)
        if lost is not None:
            raise EngineDeadError(lost.message)
        draining = self._draining.get(ready.engine)
        if draining is not None and draining.incarnation >= ready.incarnation:
            raise EngineDeadError(draining.message)

    def _connection_broke(self, ready: EngineReady) -> None:
        self._read_all(ready.engine)
        self.balancer.lost(ready.engine)
        if ready.engine not in self._draining:
            self._absences[ready.engine] = _Absence("the connection to the engine broke")
        self._close_link(ready.engine)
        self.on_connection_broken(ready)

    def _close_link(self, engine: int) -> None:
        link = self._links.pop(engine)
        if link.watch is not None:
            link.watch.close()
        if self._loop is not None:
            self._loop.remove_reader(_option(link.output, zmq.FD))
        link.input.close()
        link.output.close()

    def _read(self, engine: int) -> None:
        """Takes what has come. The descriptor signals changes only, so if something may be left this comes again."""
        if self._take(engine) and self._loop is not None:
            self._loop.call_soon(self._read, engine)

    def _read_all(self, engine: int) -> None:
        """Drains the socket to an engine core that sends nothing more."""
        while self._take(engine):
            pass

    def _take(self, engine: int) -> bool:
        """Hands out some messages, if the engine is connected; returns whether there may be more."""
        link = self._links.get(engine)
        if link is None:
            return False
        num_messages = num_bytes = 0
        self.on_waking()
        try:
            while num_messages < _MAX_MESSAGES and num_bytes < _MAX_BYTES:
                try:
                    frame = link.output.recv(zmq.NOBLOCK)
                except zmq.Again:
                    return False
                num_messages += 1
                num_bytes += len(frame)
                self._handle(frame)
                if not int(link.output.getsockopt(zmq.EVENTS)) & _POLLIN:
                    return False
        finally:
            self.on_drained()
        return True

    def _handle(self, frame: bytes) -> None:
        message = self._decoder.decode(frame)
        if isinstance(message, StepOutput):  # nearly always
            self.balancer.reported(message.engine, message.load)
            self.on_output(message)
        elif isinstance(message, LoadReport):
            self.balancer.reported(message.engine, message.load)
        elif isinstance(message, BlockEvents):
            self.balancer.blocks_changed(message.engine, message.stored, message.removed, message.is_snapshot)
        else:
            self.on_media_missing(message)

    async def _connect(self, ready: EngineReady, endpoint: str) -> "zmq.Socket[bytes]":
        """A socket whose other end has shaken hands. Whatever ends the wait, no socket stays behind."""
        socket: zmq.Socket[bytes] = connect_dealer(self._context, endpoint, self._identity, ready.endpoints.key)
        deadline = time.monotonic() + _CONNECT_TIMEOUT_S
        poll_s = _MIN_POLL_S
        try:
            while not _option(socket, zmq.EVENTS) & _POLLOUT:
                if self._closed or time.monotonic() > deadline:
                    raise EngineDeadError(f"the engine does not answer at {endpoint}")
                await asyncio.sleep(poll_s)
                self._check_alive(ready)
                poll_s = min(2 * poll_s, _MAX_POLL_S)
        except BaseException:
            socket.close()
            raise
        return socket


def _option(socket: "zmq.Socket[bytes]", option: int) -> int:
    return int(socket.getsockopt(option))


def _ignore(output: StepOutput) -> None:
    """Outputs of a client that nobody listens to."""


def _nothing_missing(message: MediaMissing) -> None:
    """Where no request has media."""


def _nobody_reconnects(ready: EngineReady) -> None:
    """Where every engine core is on this machine."""


def _not_counted(engine: int, num_bytes: int) -> None:
    """Until somebody counts what is sent."""


def _nothing() -> None:
    """Nobody wants to know."""
