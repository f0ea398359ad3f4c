"""What a headless launcher and the head say to each other, over one TCP connection for each headless launcher.

    headless launcher                     head
    JoinRequest          ──────────▶
                         ◀──────────      Challenge, or Refused
    Registration         ──────────▶
                         ◀──────────      Accepted, or Refused
    EngineUpdate, MetricFiles, Draining, Leaving ─▶
                         ◀──────────      MetricFilesKept, MetricsWanted, RanksDrained, HeadStopped
    Ping, Pulse         ◀──────────▶      Ping, Pulse

A launcher says each of the first two once, and its `EngineReady` holds no key: the head works it out itself. The end of
file means that the other side is gone; so does its silence, if it answers no `Ping` for long. `JoinRequest`,
`Challenge` and `Refused` keep their meaning over versions, so that different ones can tell each other so.
"""

from typing import Annotated

import msgspec

from tokenmill_engine.ipc.control import EngineLost, EngineRecovered, EngineStalled, MetricsWanted, Ping, Pulse
from tokenmill_engine.messages import EngineReady

_MAX_RANKS = 65535
_Rank = Annotated[int, msgspec.Meta(ge=0, le=_MAX_RANKS)]
_Nonce = Annotated[bytes, msgspec.Meta(max_length=64)]


def legible(said: str, max_chars: int = 40) -> str:
    """What somebody unknown said, fit for one line of a log."""
    return said if len(said) <= max_chars and said.isprintable() else repr(said[:max_chars])[:max_chars]


class Facts(msgspec.Struct, frozen=True):
    """What all launchers of a deployment must have in common."""

    model_name: str
    """Shown to people; may differ."""
    model_digest: str
    """Of the architecture and samples of the weights."""
    flags: dict[str, str]
    """Flag of `serve` -> its resolved value."""
    engine_flags: dict[str, str]
    """The same, of flags that only engine cores heed; empty for a head that has none."""


class JoinRequest(msgspec.Struct, tag=True, frozen=True):
    """First message of a headless launcher."""

    version: str
    """Of Tokenmill."""
    nonce: _Nonce


class Challenge(msgspec.Struct, tag=True, frozen=True):
    """The head's answer."""

    version: str
    nonce: _Nonce
    proof: bytes
    """That the head knows the token."""


class Registration(msgspec.Struct, tag=True, frozen=True):
    """The ranks that a headless launcher has, once it knows the head for the right one."""

    start_rank: _Rank
    num_ranks: _Rank
    facts: Facts
    proof: bytes
    """That the launcher knows the token."""

    @property
    def ranks(self) -> range:
        return range(self.start_rank, self.start_rank + self.num_ranks)


class Accepted(msgspec.Struct, tag=True, frozen=True):
    """The ranks are taken; their engine cores may load."""

    key_nonce: bytes
    """From which both sides make the key of the engine cores' sockets."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The launcher is not let in, or is let go; one readable sentence says why, and what to do. The connection ends."""

    message: str
    may_pass: bool = False
    """Whether the same launcher may be let in a little later."""
    worth_waiting: bool = False
    """Whether it will be, though that may take minutes: the launcher that has its ranks is about to end."""


class MetricFiles(msgspec.Struct, tag=True, frozen=True):
    """Metric files of the launcher's processes that have changed, by name: what is in use of them, compressed. None:
    the file is gone.

    They come from time to time, so that little is lost with the launcher, the next ones after `MetricFilesKept`; and
    in answer to `MetricsWanted`.
    """

    files: dict[str, bytes | None]
    answers: int = 0
    """The number of the question; 0: nobody has asked."""


class MetricFilesKept(msgspec.Struct, tag=True, frozen=True):
    """From now on /metrics tells what those files said."""


class Draining(msgspec.Struct, tag=True, frozen=True):
    """The launcher was told to stop: its ranks are to get no new requests. It ends when the head says RanksDrained or
    HeadStopped, or when its patience ends."""


class RanksDrained(msgspec.Struct, tag=True, frozen=True):
    """Nothing runs any more on the ranks of a launcher that drains."""


class Leaving(msgspec.Struct, tag=True, frozen=True):
    """The launcher ends; one sentence says why."""

    reason: str
    planned: bool = False
    """Whether it was told to."""


class HeadStopped(msgspec.Struct, tag=True, frozen=True):
    """The server was told to end; so may its launchers."""


FromLauncher = (
    JoinRequest
    | Registration
    | EngineReady
    | EngineLost
    | EngineStalled
    | EngineRecovered
    | MetricFiles
    | Draining
    | Leaving
    | Ping
    | Pulse
)
FromHead = Challenge | Accepted | Refused | MetricFilesKept | MetricsWanted | RanksDrained | HeadStopped | Ping | Pulse
