"""Where headless launchers come in: who connects is a stranger until it has shown that it fits, all of them at once.

Knows nothing of ranks that are taken, nor of what becomes of a launcher that was let in: that is `head`.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import msgspec

from tokenmill_engine.ipc.channel import ChannelClosedError, ControlChannel
from tokenmill_server.config import DataParallelConfig
from tokenmill_server.data_parallel.agreement import difference
from tokenmill_server.data_parallel.authentication import is_proof, new_nonce, proof
from tokenmill_server.data_parallel.connection import (
    MAX_HANDSHAKE_BYTES,
    MAX_MESSAGE_BYTES,
    channel_over,
    listen,
    send_if_open,
    shown,
)
from tokenmill_server.data_parallel.messages import (
    Challenge,
    Facts,
    FromLauncher,
    JoinRequest,
    Refused,
    Registration,
    legible,
)
from tokenmill_server.version import __version__
from tokenmill_server.watcher import Watcher

logger = logging.getLogger(__name__)

KEY = "headless launcher"
"""Kind of the keys of launchers in the watcher; the number of the listener is 0."""

_SILENT_S = 2.0
"""How long a stranger may say nothing: a launcher speaks at once."""
_HANDSHAKE_S = 10.0
"""How long one that has asked to join may take to register."""
_MAX_STRANGERS = 64
"""When there are more, the one that has said nothing for longest makes room."""
_MAX_ACCEPTED = 16
"""Connections that are taken before those that are there are heard again: fewer than make room for each other."""
_WARN_S = 60.0
"""Between two lines about strangers that were let go."""
_SEND_TIMEOUT_S = 1
"""Longest time that one connection may keep the head from everything else."""
_RESOURCE_PAUSE_S = 0.1
"""Wait after running out of file descriptors."""


class RefusedError(Exception):
    """A launcher may not join, or not stay; the message is for its user and ours."""

    def __init__(self, message: str, may_pass: bool = False, worth_waiting: bool = False) -> None:
        super().__init__(message)
        self.answer = Refused(message, may_pass, worth_waiting)
        """What the launcher is told."""


@dataclass(frozen=True, slots=True)
class Connection:
    """One connection, strange or not."""

    number: int
    channel: ControlChannel[FromLauncher]
    address: str
    """Of the other end."""


@dataclass(slots=True)
class _Stranger:
    connection: Connection
    deadline: float
    """For what it has to say next, on the monotonic clock."""
    nonce: bytes = field(default_factory=new_nonce)
    """Ours."""
    join_nonce: bytes | None = None
    """Its own, once it has asked to join."""


Admit = Callable[[Connection, range], None]
"""Lets in a launcher that fits, with these ranks. Raises RefusedError if it cannot have them."""


class Reception:
    """The listening socket and the connections that have not registered yet."""

    def __init__(self, parallel: DataParallelConfig, facts: Facts, watcher: Watcher, admit: Admit) -> None:
        """
        Raises:
            ConfigError, StartupError: it is impossible to wait at the address.
        """
        self._token = parallel.token
        self._facts = facts
        self._watcher = watcher
        self._admit = admit
        self._listener = listen(parallel.address, parallel.rpc_port)
        self.address = shown(*self._listener.getsockname()[:2])
        """Where it waits."""
        watcher.watch(self._listener, (KEY, 0))
        self._accept_at = inf
        """When the listener is watched again, on the monotonic clock; infinite: it is watched."""
        self._strangers: dict[int, _Stranger] = {}
        """By number, the oldest first."""
        self._last_number = 0
        self._num_let_go = 0
        """Strangers that were let go and not told of."""
        self._last_let_go = ""
        """Its address."""
        self._warn_at = -inf

    @property
    def next_tick(self) -> float:
        """When `tick` has something to do next, on the monotonic clock."""
        warn_at = self._warn_at if self._num_let_go else inf
        return min(self._accept_at, warn_at, *(stranger.deadline for stranger in self._strangers.values()))

    def tick(self) -> None:
        """To be called when `next_tick` has come, or more often: lets go of connections that do not go on."""
        now = time.monotonic()
        if self._accept_at <= now:
            self._accept_at = inf
            self._watcher.watch(self._listener, (KEY, 0))
        for stranger in list(self._strangers.values()):
            if stranger.deadline <= now:
                self._let_go(stranger)
        if self._num_let_go and self._warn_at <= now:
            logger.warning(
                "connections to %s that did not register and were let go: %d, the last one from %s",
                self.address,
                self._num_let_go,
                self._last_let_go,
            )
            self._num_let_go = 0
            self._warn_at = now + _WARN_S

    def accept(self) -> None:
        """Takes the connections that wait."""
        for _ in range(_MAX_ACCEPTED):
            try:
                accepted, where = self._listener.accept()
            except BlockingIOError:
                return
            except (InterruptedError, ConnectionAbortedError):
                continue  # it went away again
            except OSError as error:
                logger.warning("cannot accept a launcher: %s", error)
                self._watcher.unwatch(self._listener)
                self._accept_at = time.monotonic() + _RESOURCE_PAUSE_S
                return
            self._make_room()
            try:
                channel: ControlChannel[FromLauncher] = channel_over(
                    accepted, FromLauncher, max_message_bytes=MAX_HANDSHAKE_BYTES, send_timeout_s=_SEND_TIMEOUT_S
                )
            except OSError:
                accepted.close()
                continue
            self._last_number += 1
            connection = Connection(self._last_number, channel, shown(*where[:2]))
            self._strangers[connection.number] = _Stranger(connection, time.monotonic() + _SILENT_S)
            self._watcher.watch(channel, (KEY, connection.number))

    def hear(self, number: int) -> list[FromLauncher]:
        """Takes in what a stranger said; whatever it is, only its own connection may end by that. Returns what one has
        said already that was let in now."""
        stranger = self._strangers.get(number)
        if stranger is None:
            return []
        address = stranger.connection.address
        try:
            messages = stranger.connection.channel.receive_available()
            for index, message in enumerate(messages, 1):
                if self._take(stranger, message):
                    return messages[index:]
        except RefusedError as error:
            # Who is worth waiting for is asked for twice a second.
            level = logging.DEBUG if error.answer.worth_waiting else logging.WARNING
            logger.log(level, "%s is refused: %s", address, error)
            send_if_open(stranger.connection.channel, error.answer)
            self._forget(stranger)
        except (ChannelClosedError, msgspec.MsgspecError, ValueError) as error:
            logger.debug("%s left without registering: %s", address, error)
            self._forget(stranger)
        except Exception:
            logger.exception("what %s said could not be handled", address)
            self._forget(stranger)
        return []

    def close(self) -> None:
        """Lets go of all strangers, and waits for nobody any more. May be called twice."""
        for stranger in list(self._strangers.values()):
            self._forget(stranger)
        if self._listener.fileno() >= 0:
            if self._accept_at == inf:
                self._watcher.unwatch(self._listener)
            self._listener.close()

    def _make_room(self) -> None:
        if len(self._strangers) >= _MAX_STRANGERS:
            strangers = self._strangers.values()
            self._let_go(next((each for each in strangers if each.join_nonce is None), next(iter(strangers))))

    def _let_go(self, stranger: _Stranger) -> None:
        self._num_let_go += 1
        self._last_let_go = stranger.connection.address
        self._forget(stranger)

    def _forget(self, stranger: _Stranger) -> None:
        channel = stranger.connection.channel
        self._watcher.unwatch(channel)
        channel.close()
        del self._strangers[stranger.connection.number]

    def _take(self, stranger: _Stranger, message: FromLauncher) -> bool:
        """Whether the launcher is let in by this message. Raises RefusedError if it is to be turned away."""
        match message:
            case JoinRequest():
                self._challenge(stranger, message)
                return False
            case Registration():
                self._register(stranger, message)
                return True
        raise RefusedError("a launcher registers before it says anything else")

    def _challenge(self, stranger: _Stranger, request: JoinRequest) -> None:
        if stranger.join_nonce is not None:
            raise RefusedError("a launcher asks to join once")
        if request.version != __version__:
            raise RefusedError(
                f"the head runs Tokenmill {__version__} and this launcher {legible(request.version)}; install the same"
            )
        stranger.join_nonce = request.nonce
        stranger.deadline = time.monotonic() + _HANDSHAKE_S
        evidence = proof(self._token, "head", request.nonce, stranger.nonce)
        send_if_open(stranger.connection.channel, Challenge(__version__, stranger.nonce, evidence))

    def _register(self, stranger: _Stranger, registration: Registration) -> None:
        if stranger.join_nonce is None:
            raise RefusedError("a launcher registers once, after it was challenged")
        body = msgspec.json.encode(registration.facts)
        ranks = registration.ranks
        numbers = b"%d %d" % (ranks.start, ranks.stop)
        nonces = stranger.nonce, stranger.join_nonce
        if not is_proof(registration.proof, self._token, "launcher", *nonces, numbers, body):
            raise RefusedError("its --data-parallel-token is another; give all launchers the same")
        if problem := difference(self._facts, registration.facts):
            raise RefusedError(problem)
        self._admit(stranger.connection, ranks)
        del self._strangers[stranger.connection.number]
        stranger.connection.channel.max_message_bytes = MAX_MESSAGE_BYTES
        if not self._facts.engine_flags:
            # A head without engine cores learns from the first launcher what the others must have.
            self._facts = msgspec.structs.replace(self._facts, engine_flags=registration.facts.engine_flags)
