"""The API server's end of the sockets to the engine cores. Moves messages; knows nothing of text or HTTP.

Sockets are read from the event loop through ZeroMQ's edge-triggered descriptor, without tasks or futures: one
callback per wake-up drains every message, so the cost is per engine step and not per token.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import zmq

from tokenmill_engine.errors import EngineDeadError
from tokenmill_engine.ipc.ids import RequestIds, client_identity
from tokenmill_engine.ipc.sockets import connect_dealer, input_endpoint, output_endpoint
from tokenmill_engine.messages import (
    AbortRequests,
    AddRequest,
    BlockEvents,
    ClientMessage,
    EngineMessage,
    FinishReason,
    Hello,
    LoadReport,
    StepOutput,
)
from tokenmill_server.load_balancer import LoadBalancer

OutputHandler = Callable[[StepOutput], None]

_CONNECT_TIMEOUT_S = 30.0
_CONNECT_POLL_S = 0.001


@dataclass(slots=True)
class _Link:
    """The sockets to one engine core."""

    input: "zmq.Socket[bytes]"
    output: "zmq.Socket[bytes]"


class EngineClient:
    """Sends requests to engine cores and hands their outputs to `on_output`."""

    def __init__(
        self, run_dir: str, client: int, incarnation: int, num_engines: int, on_output: OutputHandler | None = None
    ) -> None:
        self.num_engines = num_engines
        self.balancer = LoadBalancer(num_engines)
        self.on_output = on_output or _ignore
        self.on_drained: Callable[[], None] = _nothing
        """Called when a wake-up has handed out everything that had come."""
        self._run_dir = run_dir
        self._hello = Hello(client, incarnation)
        self._identity = client_identity(client)
        self._ids = RequestIds(client, incarnation)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.setsockopt(zmq.IMMEDIATE, 1)  # writable only once connected
        self._links: list[_Link] = []
        self._deaths: dict[int, str] = {}
        """Why an engine is gone. One may die before this connects to it."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Connects to every engine core; they must have bound their sockets. Raises EngineDeadError if one is gone.

        The output side is up before the input side begins: an engine must know this client before it answers it. From
        its greeting on, each engine reports its load also while this client has nothing there.
        """
        self._loop = asyncio.get_running_loop()
        for engine in range(self.num_engines):
            output = await self._connect(engine, output_endpoint(self._run_dir, engine))
            link = _Link(await self._connect(engine, input_endpoint(self._run_dir, engine)), output)
            self._links.append(link)
            self._loop.add_reader(_option(output, zmq.FD), self._read, engine)
            self._send(engine, self._hello)
            self._read(engine)

    def close(self) -> None:
        """Closes the sockets. Engines hear nothing of it: abort open requests before."""
        for link in self._links:
            if self._loop is not None:
                self._loop.remove_reader(_option(link.output, zmq.FD))
            link.input.close()
            link.output.close()
        self._links.clear()
        self._context.term()

    def new_request_id(self) -> int:
        return self._ids.next()

    def choose_engine(self, pinned: int | None = None) -> int:
        """The engine core for the next request. Raises EngineDeadError if it is gone."""
        engine = self.balancer.choose(pinned)
        self._check_alive(engine)
        return engine

    def add(self, engine: int, requests: Sequence[AddRequest]) -> None:
        """Hands requests to `engine`. Each must end in `ended`. Raises EngineDeadError if it is gone."""
        self._check_alive(engine)
        for request in requests:
            if not self._send(engine, request):
                raise EngineDeadError(f"engine core {engine} is gone")
        self.balancer.sent(engine, len(requests))

    def abort(self, engine: int, request_ids: list[int], reason: FinishReason) -> None:
        """Makes `engine` forget requests; no output of theirs follows."""
        if request_ids and engine not in self._deaths:
            self._send(engine, AbortRequests(request_ids, reason))

    def ended(self, engine: int) -> None:
        """One request on `engine` is over, whatever the reason."""
        self.balancer.ended(engine)

    def engine_died(self, engine: int, message: str) -> None:
        """From now on nothing is sent to `engine`; whoever tries is told `message`."""
        self._deaths[engine] = message

    def _send(self, engine: int, message: ClientMessage) -> bool:
        """Whether the engine was there to take it: the queue has no limit, so a full one means no connection."""
        try:
            self._links[engine].input.send(self._encoder.encode(message), flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _check_alive(self, engine: int) -> None:
        if engine in self._deaths:
            raise EngineDeadError(self._deaths[engine])
        if engine >= len(self._links):
            raise EngineDeadError("the engine is not connected")

    def _read(self, engine: int) -> None:
        """Drains the output socket. Its descriptor signals changes only, so nothing may be left behind."""
        if engine >= len(self._links):
            return
        socket = self._links[engine].output
        while _option(socket, zmq.EVENTS) & zmq.POLLIN:
            try:
                frame = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._handle(frame)
        self.on_drained()

    def _handle(self, frame: bytes) -> None:
        message = self._decoder.decode(frame)
        if isinstance(message, BlockEvents):
            return
        self.balancer.reported(message.engine, message.load)
        if isinstance(message, LoadReport):
            return
        self.on_output(message)

    async def _connect(self, engine: int, endpoint: str) -> "zmq.Socket[bytes]":
        """A socket whose other end has shaken hands."""
        socket: zmq.Socket[bytes] = connect_dealer(self._context, endpoint, self._identity)
        deadline = time.monotonic() + _CONNECT_TIMEOUT_S
        while not _option(socket, zmq.EVENTS) & zmq.POLLOUT:
            if engine in self._deaths or time.monotonic() > deadline:
                socket.close()
                raise EngineDeadError(self._deaths.get(engine) or f"the engine does not answer at {endpoint}")
            await asyncio.sleep(_CONNECT_POLL_S)
        return socket


def _option(socket: "zmq.Socket[bytes]", option: int) -> int:
    return int(socket.getsockopt(option))


def _ignore(output: StepOutput) -> None:
    """Outputs of a client that nobody listens to."""


def _nothing() -> None:
    """Nobody wants to know."""
