"""The head's view of headless launchers: which ranks they have, whether they live, and what becomes of their engine
cores, told in the same words as `EngineSupervisor` tells of those of this machine."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tokenmill_engine.ipc.channel import ChannelClosedError
from tokenmill_engine.ipc.control import (
    EngineDraining,
    EngineLost,
    EngineRecovered,
    EngineStalled,
    MetricsWanted,
    Ping,
    Pulse,
)
from tokenmill_engine.ipc.sockets import public_key
from tokenmill_engine.messages import EngineReady
from tokenmill_server.config import DataParallelConfig
from tokenmill_server.data_parallel import metric_copies
from tokenmill_server.data_parallel.authentication import engine_key, new_nonce
from tokenmill_server.data_parallel.connection import send_if_open
from tokenmill_server.data_parallel.draining import EngineDrains
from tokenmill_server.data_parallel.messages import (
    Accepted,
    Draining,
    Facts,
    FromHead,
    FromLauncher,
    HeadStopped,
    JoinRequest,
    Leaving,
    MetricFiles,
    MetricFilesKept,
    RanksDrained,
    Refused,
    Registration,
)
from tokenmill_server.data_parallel.ranks import phrase, without
from tokenmill_server.data_parallel.reception import KEY, Connection, Reception, RefusedError
from tokenmill_server.engine_table import EngineUpdate, ProcessUpdate
from tokenmill_server.liveness import Liveness
from tokenmill_server.watcher import Readable, Watcher

logger = logging.getLogger(__name__)

_REMIND_S = 10.0
_MAX_UNANSWERED = 16
"""Questions for metrics that a launcher may owe before it is asked no more."""
_MAX_INCARNATION = 2**31


@dataclass(slots=True)
class _Launcher:
    """One that was let in."""

    connection: Connection
    ranks: range
    parting: str = ""
    """Why it leaves, if it has said so."""
    is_planned: bool = False
    """It was told to."""
    draining: set[int] | None = None
    """Of one that is about to leave: the ranks where something still runs."""

    @property
    def number(self) -> int:
        return self.connection.number

    @property
    def name(self) -> str:
        return f"the launcher of {phrase(self.ranks)} at {self.connection.address}"


@dataclass(slots=True)
class _Question:
    """A request for metrics that is not answered by all."""

    launchers: set[int]
    """Numbers of those that have not answered."""
    on_fetched: Callable[[], None]


class RemoteEngines:
    """The engine cores of headless launchers."""

    def __init__(
        self, parallel: DataParallelConfig, facts: Facts, watcher: Watcher, metrics: Path, gives_up: bool = True
    ) -> None:
        """`metrics`: the folder where /metrics finds the values of all processes. `gives_up`: whether a launcher that
        does not react counts as gone.

        Raises:
            ConfigError, StartupError: it is impossible to wait at the address.
        """
        self._parallel = parallel
        self._watcher = watcher
        self._metrics = metrics
        self._key_nonce = new_nonce()
        self._public_key = public_key(engine_key(parallel.token, self._key_nonce))
        """Of all engine cores' sockets."""
        self._launchers: dict[int, _Launcher] = {}
        self._liveness = Liveness(gives_up)
        self._incarnations: dict[int, int] = {}
        """Of ranks that have served: the number of the latest incarnation, over all launchers that have had it."""
        self._bases: dict[int, int] = {}
        """What the first incarnation of a rank in its present launcher counts as."""
        self._serving: set[int] = set()
        self._restarting: set[int] = set()
        """Ranks that have served, and whose launchers start them again."""
        self.drains = EngineDrains(self._drained)
        """Who reports `EngineDraining` to API servers begins a drain here; their answers, and ends, go there too."""
        self._questions: dict[int, _Question] = {}
        self._last_question = 0
        self._remind_at = time.monotonic() + _REMIND_S
        self._reception = Reception(parallel, facts, watcher, self._admit)
        self.address = self._reception.address
        """Where it waits for launchers."""
        logger.info(
            "waiting at %s for %s of headless launchers%s",
            self.address,
            phrase(self.missing),
            "" if parallel.token else "; without --data-parallel-token, whoever can reach this address may join",
        )

    @property
    def missing(self) -> list[int]:
        """The ranks that no launcher has."""
        theirs = (launcher.ranks for launcher in self._launchers.values())
        return without(range(self._parallel.size), self._parallel.local_ranks, *theirs)

    @property
    def next_tick(self) -> float:
        """When `tick` has something to do next, on the monotonic clock."""
        return min(self._remind_at, self._reception.next_tick, self._liveness.next_look)

    def tick(self) -> list[EngineUpdate]:
        """To be called when `next_tick` has come, or more often: asks launchers whether they live, lets go of those
        that do not react and of connections that do not register, and reminds of those that are missing. Returns what
        changes for others."""
        self._reception.tick()
        updates: list[EngineUpdate] = []
        for (_, number), fault in self._liveness.look():
            launcher = self._launchers[number]
            reason = f"it {fault}"
            self._send(launcher, Refused(reason))
            updates += self._lost(launcher, reason)
        now = time.monotonic()
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
        return updates

    def handle(self, event: Readable) -> list[EngineUpdate]:
        """Takes in what a launcher said; returns what it changes for others."""
        number = event.key[1]
        if number == 0:
            self._reception.accept()
            return []
        if number in self._launchers:
            return self._receive(self._launchers[number])
        said_early = self._reception.hear(number)
        return self._receive(self._launchers[number], said_early) if said_early else []

    def fetch_metrics(self, on_fetched: Callable[[], None]) -> None:
        """Calls `on_fetched` when the folder of metrics has what the engine cores of all launchers have counted until
        now, as far as those answer."""
        self._last_question += 1
        owed = Counter(number for question in self._questions.values() for number in question.launchers)
        asked = {number for number in self._launchers if owed[number] < _MAX_UNANSWERED}
        self._questions[self._last_question] = _Question(asked, on_fetched)
        for number in asked:
            self._send(self._launchers[number], MetricsWanted(self._last_question))
        self._answered(0)

    def say_goodbye(self) -> None:
        """Tells the launchers that the server ends as it should."""
        for launcher in self._launchers.values():
            self._send(launcher, HeadStopped())

    def close(self) -> None:
        """Lets go of all launchers, which ends them. May be called twice."""
        for launcher in list(self._launchers.values()):
            self._forget(launcher)
        self._reception.close()

    # --- connections ----------------------------------------------------------------------------------------------

    def _admit(self, connection: Connection, ranks: range) -> None:
        """Raises RefusedError if a launcher cannot have these ranks."""
        self._check_ranks(ranks)
        launcher = _Launcher(connection, ranks)
        self._launchers[connection.number] = launcher
        for rank in ranks:
            self._bases[rank] = self._incarnations.get(rank, -1) + 1
        self._liveness.watch((KEY, connection.number), connection.channel)
        self._liveness.expect_answers((KEY, connection.number))
        self._send(launcher, Accepted(self._key_nonce))
        logger.info("%s has joined%s", launcher.name, f"; still missing: {phrase(m)}" if (m := self.missing) else "")

    def _check_ranks(self, ranks: range) -> None:
        size = self._parallel.size
        if not 0 <= ranks.start < ranks.stop <= size:
            raise RefusedError(f"its ranks, from {ranks.start} on {len(ranks)}, are not among 0 to {size - 1}")
        taken = self._parallel.local_ranks
        if set(ranks) & set(taken):
            raise RefusedError(
                f"the head itself runs {phrase(taken)}; use --data-parallel-start-rank {taken.stop} or more, or give "
                "the head another --data-parallel-size-local"
            )
        for other in self._launchers.values():
            if set(ranks).intersection(other.ranks):
                if other.draining is not None:
                    raise RefusedError(f"{other.name} finishes what runs there before it ends", worth_waiting=True)
                advice = "no rank is free; stop that launcher first, or raise --data-parallel-size everywhere"
                if missing := self.missing:
                    advice = f"free: {phrase(missing)}; use another --data-parallel-start-rank"
                raise RefusedError(f"{other.name} has joined already; {advice}", may_pass=True)

    def _receive(self, launcher: _Launcher, said_early: list[FromLauncher] | None = None) -> list[EngineUpdate]:
        """Whatever it says, only its own connection may end by that."""
        updates: list[EngineUpdate] = []
        try:
            messages = said_early or launcher.connection.channel.receive_available()
            self._liveness.answered((KEY, launcher.number))
            for message in messages:
                updates += self._take(launcher, message)
        except RefusedError as error:
            logger.warning("%s is refused: %s", launcher.name, error)
            self._send(launcher, error.answer)
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
        metric_copies.drop_gauges(self._metrics, launcher.number)
        in_good_order = logging.WARNING if launcher.draining else logging.INFO
        level = in_good_order if launcher.is_planned else logging.ERROR
        logger.log(level, "%s is gone: %s", launcher.name, launcher.parting or reason)
        gone = [rank for rank in launcher.ranks if rank in self._serving | self._restarting]
        self._serving.difference_update(gone)
        self._restarting.difference_update(gone)
        self._remind_at = time.monotonic() + _REMIND_S
        return [
            EngineLost(
                rank,
                self._incarnations[rank],
                f"engine core {rank} is gone with its launcher",
                may_return=True,
                planned=launcher.is_planned,
            )
            for rank in gone
        ]

    def _begin_drain(self, launcher: _Launcher) -> list[EngineUpdate]:
        draining = [rank for rank in launcher.ranks if rank in self._serving]
        launcher.draining = set(draining)
        if not draining:
            self._send(launcher, RanksDrained())
        reason = "takes no new requests, since its launcher was told to stop"
        return [EngineDraining(rank, self._incarnations[rank], f"engine core {rank} {reason}") for rank in draining]

    def _drained(self, rank: int) -> None:
        """Nothing runs there any more."""
        for launcher in self._launchers.values():
            if launcher.draining and rank in launcher.draining:
                launcher.draining.remove(rank)
                if not launcher.draining:
                    self._send(launcher, RanksDrained())

    def _answered(self, number: int, question: int | None = None) -> None:
        """Launcher `number` has answered a question for metrics, or (None) will answer none any more."""
        for key, asked in list(self._questions.items()):
            if question in (None, key):
                asked.launchers.discard(number)
            if not asked.launchers:
                del self._questions[key]
                asked.on_fetched()

    def _forget(self, launcher: _Launcher) -> None:
        self._watcher.unwatch(launcher.connection.channel)
        launcher.connection.channel.close()
        del self._launchers[launcher.number]
        self._liveness.forget((KEY, launcher.number))
        self._answered(launcher.number)

    def _send(self, launcher: _Launcher, message: FromHead) -> None:
        send_if_open(launcher.connection.channel, message)

    # --- messages -------------------------------------------------------------------------------------------------

    def _take(self, launcher: _Launcher, message: FromLauncher) -> list[EngineUpdate]:
        """Raises RefusedError if the launcher is to be turned away."""
        match message:
            case JoinRequest() | Registration():
                raise RefusedError("a launcher joins once")
            case Ping():
                self._send(launcher, Pulse())
            case Pulse():
                pass  # that it says something is all there is to it
            case MetricFiles(files=files, answers=question):
                metric_copies.keep(self._metrics, launcher.number, files)
                if question:
                    self._answered(launcher.number, question)
                else:
                    self._send(launcher, MetricFilesKept())
            case Draining() if launcher.draining is None:
                return self._begin_drain(launcher)
            case Leaving(reason=reason, planned=planned):
                launcher.parting, launcher.is_planned = reason, planned
            case EngineReady() | EngineLost() | EngineStalled() | EngineRecovered():
                if message.engine not in launcher.ranks:
                    raise ValueError(f"engine core {message.engine} is none of its own")
                return [self._translate(message)]
        return []

    def _translate(self, update: ProcessUpdate) -> ProcessUpdate:
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
            self._restarting.discard(rank)
            changes["endpoints"] = msgspec.structs.replace(update.endpoints, key=self._public_key)
        elif isinstance(update, EngineLost):
            self._serving.discard(rank)
            self._drained(rank)
            if update.restarts:
                self._restarting.add(rank)
            else:
                self._restarting.discard(rank)
                changes["message"] = f"{update.message}, and its launcher does not start it again"
                changes["may_return"] = True
        return msgspec.structs.replace(update, incarnation=incarnation, **changes)
