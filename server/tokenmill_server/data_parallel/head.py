"""The head's view of headless launchers: it waits for them, lets in those that fit, and tells what becomes of their
engine cores, in the same words as `EngineSupervisor` tells of those of this machine."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from tokenmill_engine.ipc.channel import ChannelClosedError, ControlChannel
from tokenmill_engine.ipc.control import EngineLost, EngineRecovered, EngineStalled, MetricsWanted
from tokenmill_engine.ipc.sockets import public_key
from tokenmill_engine.messages import EngineReady
from tokenmill_server.config import DataParallelConfig
from tokenmill_server.data_parallel import metric_copies
from tokenmill_server.data_parallel.agreement import difference
from tokenmill_server.data_parallel.authentication import engine_key, is_proof, new_nonce, proof
from tokenmill_server.data_parallel.connection import (
    MAX_HANDSHAKE_BYTES,
    MAX_MESSAGE_BYTES,
    channel_over,
    listen,
    shown,
)
from tokenmill_server.data_parallel.messages import (
    Accepted,
    Challenge,
    Facts,
    FromHead,
    FromLauncher,
    HeadStopped,
    JoinRequest,
    Leaving,
    MetricFiles,
    MetricFilesKept,
    Refused,
    Registration,
    legible,
)
from tokenmill_server.data_parallel.ranks import phrase, without
from tokenmill_server.engine_table import EngineUpdate
from tokenmill_server.version import __version__
from tokenmill_server.watcher import Readable, Watcher

logger = logging.getLogger(__name__)

KEY = "headless launcher"
"""Kind of this module's keys in the watcher."""

_HANDSHAKE_S = 10.0
_MAX_STRANGERS = 64
"""Connections that have not registered yet."""
_REMIND_S = 10.0
_SEND_TIMEOUT_S = 1
"""Longest time that one connection may keep the head from everything else."""
_RESOURCE_PAUSE_S = 0.1
"""Wait after running out of file descriptors."""
_MAX_UNANSWERED = 16
"""Questions for metrics that a launcher may owe before it is asked no more."""
_MAX_INCARNATION = 2**31


class _RefusedError(Exception):
    """A launcher may not join, or not stay; the message is for its user and ours."""

    def __init__(self, message: str, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass


@dataclass(slots=True)
class _Launcher:
    """One connection, and what is known of who is at its other end."""

    number: int
    channel: ControlChannel[FromLauncher]
    address: str
    deadline: float
    """For its registration, on the monotonic clock."""
    nonce: bytes = field(default_factory=new_nonce)
    """Ours."""
    join_nonce: bytes | None = None
    """The launcher's, once it has asked to join."""
    ranks: range | None = None
    """Once it is accepted."""
    parting: str = ""
    """Why it leaves, if it has said so."""

    @property
    def name(self) -> str:
        return self.address if self.ranks is None else f"the launcher of {phrase(self.ranks)} at {self.address}"


@dataclass(slots=True)
class _Question:
    """A request for metrics that is not answered by all."""

    launchers: set[int]
    """Numbers of those that have not answered."""
    on_fetched: Callable[[], None]


class RemoteEngines:
    """The engine cores of headless launchers."""

    def __init__(self, parallel: DataParallelConfig, facts: Facts, watcher: Watcher, metrics: Path) -> None:
        """`metrics`: the folder where /metrics finds the values of all processes.

        Raises:
            ConfigError, StartupError: it is impossible to wait at the address.
        """
        self._parallel = parallel
        self._facts = facts
        self._watcher = watcher
        self._metrics = metrics
        self._key_nonce = new_nonce()
        self._public_key = public_key(engine_key(parallel.token, self._key_nonce))
        """Of all engine cores' sockets."""
        self._listener = listen(parallel.address, parallel.rpc_port)
        self.address = shown(*self._listener.getsockname()[:2])
        """Where it waits."""
        watcher.watch(self._listener, (KEY, 0))
        self._accept_at = inf
        """When the listener is watched again, on the monotonic clock; infinite: it is watched."""
        self._launchers: dict[int, _Launcher] = {}
        self._last_number = 0
        self._incarnations: dict[int, int] = {}
        """Of ranks that have served: the number of the latest incarnation, over all launchers that have had it."""
        self._bases: dict[int, int] = {}
        """What the first incarnation of a rank in its present launcher counts as."""
        self._serving: set[int] = set()
        self._questions: dict[int, _Question] = {}
        self._last_question = 0
        self._remind_at = time.monotonic() + _REMIND_S
        logger.info(
            "waiting at %s for %s of headless launchers%s",
            self.address,
            phrase(self.missing),
            "" if parallel.token else "; without --data-parallel-token, whoever can reach this address may join",
        )

    @property
    def missing(self) -> list[int]:
        """The ranks that no launcher has."""
        theirs = (launcher.ranks for launcher in self._launchers.values() if launcher.ranks is not None)
        return without(range(self._parallel.size), self._parallel.local_ranks, *theirs)

    @property
    def next_tick(self) -> float:
        """When `tick` has something to do next, on the monotonic clock."""
        return min(self._remind_at, self._accept_at, *(launcher.deadline for launcher in self._strangers()))

    def tick(self) -> None:
        """To be called when `next_tick` has come, or more often: reminds of missing launchers, lets go of connections
        that say nothing."""
        now = time.monotonic()
        if self._accept_at <= now:
            self._accept_at = inf
            self._watcher.watch(self._listener, (KEY, 0))
        for launcher in list(self._strangers()):
            if launcher.deadline <= now:
                logger.warning("%s connected but did not register; it is let go", launcher.address)
                self._forget(launcher)
        if self._remind_at <= now:
            self._remind_at = now + _REMIND_S
            if missing := self.missing:
                logger.info(
                    "no launcher has %s yet: start it with --headless --data-parallel-start-rank %d, and with "
                    "--data-parallel-address and --data-parallel-rpc-port of this head (%s)",
                    phrase(missing),
                    missing[0],
                    self.address,
                )

    def handle(self, event: Readable) -> list[EngineUpdate]:
        """Takes in what a launcher said; returns what it changes for others."""
        number = event.key[1]
        if number == 0:
            self._accept()
            return []
        launcher = self._launchers.get(number)
        return [] if launcher is None else self._receive(launcher)

    def fetch_metrics(self, on_fetched: Callable[[], None]) -> None:
        """Calls `on_fetched` when the folder of metrics has what the engine cores of all launchers have counted until
        now, as far as those answer."""
        self._last_question += 1
        owed = Counter(number for question in self._questions.values() for number in question.launchers)
        asked = {launcher.number for launcher in self._members() if owed[launcher.number] < _MAX_UNANSWERED}
        self._questions[self._last_question] = _Question(asked, on_fetched)
        for number in asked:
            self._send(self._launchers[number], MetricsWanted(self._last_question))
        self._answered(0)

    def say_goodbye(self) -> None:
        """Tells the launchers that the server ends as it should."""
        for launcher in self._members():
            self._send(launcher, HeadStopped())

    def close(self) -> None:
        """Lets go of all launchers, which ends them. May be called twice."""
        for launcher in list(self._launchers.values()):
            self._forget(launcher)
        if self._listener.fileno() >= 0:
            if self._accept_at == inf:
                self._watcher.unwatch(self._listener)
            self._listener.close()

    # --- connections ----------------------------------------------------------------------------------------------

    def _strangers(self) -> Iterable[_Launcher]:
        return (launcher for launcher in self._launchers.values() if launcher.ranks is None)

    def _members(self) -> Iterable[_Launcher]:
        return (launcher for launcher in self._launchers.values() if launcher.ranks is not None)

    def _accept(self) -> None:
        try:
            connection, where = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # it went away again
        except OSError as error:
            logger.warning("cannot accept a launcher: %s", error)
            self._watcher.unwatch(self._listener)
            self._accept_at = time.monotonic() + _RESOURCE_PAUSE_S
            return
        if sum(1 for _ in self._strangers()) >= _MAX_STRANGERS:
            connection.close()
            return
        self._last_number += 1
        try:
            channel: ControlChannel[FromLauncher] = channel_over(
                connection, FromLauncher, max_message_bytes=MAX_HANDSHAKE_BYTES, send_timeout_s=_SEND_TIMEOUT_S
            )
        except OSError:
            connection.close()
            return
        address = shown(*where[:2])
        launcher = _Launcher(self._last_number, channel, address, time.monotonic() + _HANDSHAKE_S)
        self._launchers[launcher.number] = launcher
        self._watcher.watch(channel, (KEY, launcher.number))

    def _receive(self, launcher: _Launcher) -> list[EngineUpdate]:
        """Whatever it says, only its own connection may end by that."""
        updates: list[EngineUpdate] = []
        try:
            for message in launcher.channel.receive_available():
                updates += self._take(launcher, message)
        except _RefusedError as error:
            logger.warning("%s is refused: %s", launcher.name, error)
            self._send(launcher, Refused(str(error), error.may_pass))
            return updates + self._lost(launcher, str(error))
        except ChannelClosedError as error:
            return updates + self._lost(launcher, f"its connection ended ({error})")
        except (msgspec.MsgspecError, ValueError) as error:
            return updates + self._lost(launcher, f"it said what is no message of ours: {error}")
        except Exception as error:
            logger.exception("what %s said could not be handled", launcher.name)
            return updates + self._lost(launcher, str(error))
        return updates

    def _lost(self, launcher: _Launcher, reason: str) -> list[EngineUpdate]:
        """The connection is over; its engine cores end, or have ended."""
        self._forget(launcher)
        if launcher.ranks is None:
            logger.debug("%s left without registering: %s", launcher.address, reason)
            return []
        metric_copies.drop_gauges(self._metrics, launcher.number)
        logger.error("%s is gone: %s", launcher.name, launcher.parting or reason)
        gone = [rank for rank in launcher.ranks if rank in self._serving]
        self._serving.difference_update(gone)
        self._remind_at = time.monotonic() + _REMIND_S
        return [
            EngineLost(rank, self._incarnations[rank], f"engine core {rank} is gone with its launcher", may_return=True)
            for rank in gone
        ]

    def _answered(self, number: int, question: int | None = None) -> None:
        """Launcher `number` has answered a question for metrics, or (None) will answer none any more."""
        for key, asked in list(self._questions.items()):
            if question in (None, key):
                asked.launchers.discard(number)
            if not asked.launchers:
                del self._questions[key]
                asked.on_fetched()

    def _forget(self, launcher: _Launcher) -> None:
        self._watcher.unwatch(launcher.channel)
        launcher.channel.close()
        del self._launchers[launcher.number]
        self._answered(launcher.number)

    def _send(self, launcher: _Launcher, message: FromHead) -> None:
        try:
            launcher.channel.send(message)
        except ChannelClosedError:
            logger.debug("%s is gone; its end of file follows", launcher.name)

    # --- messages -------------------------------------------------------------------------------------------------

    def _take(self, launcher: _Launcher, message: FromLauncher) -> list[EngineUpdate]:
        """Raises _RefusedError if the launcher is to be turned away."""
        match message:
            case JoinRequest():
                self._challenge(launcher, message)
                return []
            case Registration():
                self._register(launcher, message)
                return []
        if launcher.ranks is None:
            raise _RefusedError("a launcher registers before it says anything else")
        match message:
            case MetricFiles(files=files, answers=question):
                metric_copies.keep(self._metrics, launcher.number, files)
                if question:
                    self._answered(launcher.number, question)
                else:
                    self._send(launcher, MetricFilesKept())
            case Leaving(reason=reason):
                launcher.parting = reason
            case EngineReady() | EngineLost() | EngineStalled() | EngineRecovered():
                if message.engine not in launcher.ranks:
                    raise ValueError(f"engine core {message.engine} is none of its own")
                return [self._translate(message)]
        return []

    def _challenge(self, launcher: _Launcher, request: JoinRequest) -> None:
        if launcher.join_nonce is not None:
            raise _RefusedError("a launcher asks to join once")
        if request.version != __version__:
            raise _RefusedError(
                f"the head runs Tokenmill {__version__} and this launcher {legible(request.version)}; install the same"
            )
        launcher.join_nonce = request.nonce
        evidence = proof(self._parallel.token, "head", request.nonce, launcher.nonce)
        self._send(launcher, Challenge(__version__, launcher.nonce, evidence))

    def _register(self, launcher: _Launcher, registration: Registration) -> None:
        if launcher.join_nonce is None or launcher.ranks is not None:
            raise _RefusedError("a launcher registers once, after it was challenged")
        body = msgspec.json.encode(registration.facts)
        ranks = registration.ranks
        numbers = b"%d %d" % (ranks.start, ranks.stop)
        nonces = launcher.nonce, launcher.join_nonce
        if not is_proof(registration.proof, self._parallel.token, "launcher", *nonces, numbers, body):
            raise _RefusedError("its --data-parallel-token is another; give all launchers the same")
        if problem := difference(self._facts, registration.facts):
            raise _RefusedError(problem)
        self._check_ranks(ranks)
        if not self._facts.engine_flags:
            # A head without engine cores learns from the first launcher what the others must have.
            self._facts = msgspec.structs.replace(self._facts, engine_flags=registration.facts.engine_flags)
        launcher.ranks = ranks
        launcher.channel.max_message_bytes = MAX_MESSAGE_BYTES
        for rank in ranks:
            self._bases[rank] = self._incarnations.get(rank, -1) + 1
        self._send(launcher, Accepted(self._key_nonce))
        logger.info("%s has joined%s", launcher.name, f"; still missing: {phrase(m)}" if (m := self.missing) else "")

    def _check_ranks(self, ranks: range) -> None:
        size = self._parallel.size
        if not 0 <= ranks.start < ranks.stop <= size:
            raise _RefusedError(f"its ranks, from {ranks.start} on {len(ranks)}, are not among 0 to {size - 1}")
        taken = self._parallel.local_ranks
        if set(ranks) & set(taken):
            raise _RefusedError(
                f"the head itself runs {phrase(taken)}; use --data-parallel-start-rank {taken.stop} or more, or give "
                "the head another --data-parallel-size-local"
            )
        for other in self._members():
            if set(ranks).intersection(other.ranks or ()):
                free = f"free: {phrase(missing)}" if (missing := self.missing) else "no rank is free"
                raise _RefusedError(
                    f"{other.name} has joined already; {free}; use another --data-parallel-start-rank", may_pass=True
                )

    def _translate(self, update: EngineUpdate) -> EngineUpdate:
        """As the head has to say it. A launcher counts the incarnations of its engine cores from 0; over all launchers
        they never repeat. It knows which of them it does not start again, but not whether another launcher comes."""
        rank = update.engine
        if not 0 <= update.incarnation < _MAX_INCARNATION:
            raise ValueError(f"engine core {rank} has no incarnation {update.incarnation}")
        incarnation = self._bases[rank] + update.incarnation
        self._incarnations[rank] = max(incarnation, self._incarnations.get(rank, 0))
        changes: dict[str, Any] = {}
        if isinstance(update, EngineReady):
            self._serving.add(rank)
            changes["endpoints"] = msgspec.structs.replace(update.endpoints, key=self._public_key)
        elif isinstance(update, EngineLost):
            self._serving.discard(rank)
            if not update.restarts:
                changes["message"] = f"{update.message}, and its launcher does not start it again"
                changes["may_return"] = True
        return msgspec.structs.replace(update, incarnation=incarnation, **changes)
