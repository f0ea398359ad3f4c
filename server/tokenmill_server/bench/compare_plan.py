"""What `bench compare` measures: the loads of each group, who runs them in which order, and the rows of the table.

    offline    both shapes through each side's `LLM` class: throughput, prefill, time of a decode step
    online8b   an 8B server: full load, a single client, seconds from the command to the first answer
    online1b   a 1B server, where the front end is the limit: default flags, one and several API servers

The two sides cannot share the device's memory, so they take turns. Our start takes seconds, the peer's a minute or two,
so it is ours that starts again: one half of our rounds runs before the peer's and the other half after them, which
shows (and halves) what the machine's drift does to the comparison. The peer starts once for each kind of flags.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Group = Literal["offline", "online8b", "online1b"]
GROUPS: tuple[Group, ...] = ("offline", "online8b", "online1b")
Side = Literal["ours", "peer"]
Kind = Literal["throughput", "decode", "serve"]
Cache = Literal["default", "empty", "kept"]
"""Caches of compiled code: those of the machine, new ones of the side, or what these hold by now."""

DEFAULT = "default flags"
ONE_SERVER = "--api-server-count 1"
FOUR_SERVERS = "--api-server-count 4"

START = "start"
"""Name of the measurement that every server yields before its loads."""

_DECODE_OUTPUT_LEN = 136
_MIN_DECODE_OUTPUT_LEN = 16


@dataclass(slots=True, frozen=True)
class Load:
    """One measurement: `num_prompts` prompts of `input_len` random tokens with `output_len` tokens of output.

    `throughput` sends them all at once and `decode` times the steps that only decode, both through `LLM`; `serve`
    keeps `concurrency` of them open at a server.
    """

    name: str
    kind: Kind
    num_prompts: int
    input_len: int
    output_len: int
    concurrency: int = 0
    expected_s: float = 8.0
    """What it took on an H100: decides whether another round fits, until the side has run it here."""

    def shrunk(self, divisor: int) -> "Load":
        """A `divisor`-th of every size, for small machines."""
        output_len = max(1, self.output_len // divisor)
        return replace(
            self,
            num_prompts=max(1, self.num_prompts // divisor),
            input_len=max(1, self.input_len // divisor),
            output_len=max(output_len, _MIN_DECODE_OUTPUT_LEN) if self.kind == "decode" else output_len,
            concurrency=max(1, self.concurrency // divisor) if self.kind == "serve" else 0,
            expected_s=self.expected_s / divisor,
        )


@dataclass(slots=True, frozen=True)
class Session:
    """One start of one side, and the rounds that it runs before it ends."""

    side: Side
    model: str
    """`8b` or `1b`."""
    loads: tuple[Load, ...]
    rounds: range
    variant: str = DEFAULT
    """The flags beside the common ones, or DEFAULT."""
    cache: Cache = "default"

    @property
    def flags(self) -> tuple[str, ...]:
        return () if self.variant == DEFAULT else tuple(self.variant.split())

    @property
    def start_metrics(self) -> tuple[str, ...]:
        """Names under which the time of this start is compared."""
        return () if self.cache == "default" else (f"{self.cache}_s",)

    @property
    def is_server(self) -> bool:
        return all(load.kind == "serve" for load in self.loads)


@dataclass(slots=True, frozen=True)
class Row:
    """One line of the table: a figure of one load, ours beside the peer's."""

    title: str
    load: str
    metric: str
    ours: str = DEFAULT
    """Our variant."""
    peer: str = DEFAULT


_DECODES = ((256, 9.0, 2.5), (128, 2.5, 1.2), (32, 1.4, 0.6), (8, 1.2, 0.5), (1, 1.0, 0.4))
"""Batch, seconds with 8B and with 1B. The largest comes first: its prompts are in the prefix cache for the others."""
_OFFLINE_8B = (
    Load("8b 256 x 1024/128", "throughput", 256, 1024, 128, expected_s=9.0),
    Load("8b 512 x 128/128", "throughput", 512, 128, 128, expected_s=4.0),
    *(
        Load(f"8b decode {size}", "decode", size, 1024, _DECODE_OUTPUT_LEN, expected_s=large_s)
        for size, large_s, _ in _DECODES
    ),
)
_OFFLINE_1B = (
    Load("1b 512 x 128/128", "throughput", 512, 128, 128, expected_s=2.0),
    *(
        Load(f"1b decode {size}", "decode", size, 1024, _DECODE_OUTPUT_LEN, expected_s=small_s)
        for size, _, small_s in _DECODES
    ),
)
_ONLINE_8B = (
    Load("8b 256 clients 1024/128", "serve", 768, 1024, 128, 256, expected_s=29.0),
    Load("8b 1 client 1024/128", "serve", 8, 1024, 128, 1, expected_s=8.0),
)
_ONLINE_1B = (Load("1b 256 clients 128/256", "serve", 2048, 128, 256, 256, expected_s=30.0),)

_LOADS: dict[Group, dict[str, tuple[Load, ...]]] = {
    "offline": {"8b": _OFFLINE_8B, "1b": _OFFLINE_1B},
    "online8b": {"8b": _ONLINE_8B},
    "online1b": {"1b": _ONLINE_1B},
}


def loads_of(group: Group, selected: Sequence[str], divisor: int) -> dict[str, tuple[Load, ...]]:
    """The loads by model. `selected` keeps those whose names contain one of these texts; none keeps all. Of loads that
    `divisor` makes equal the first one stays."""
    chosen: dict[str, tuple[Load, ...]] = {}
    for model, loads in _LOADS[group].items():
        sizes: dict[Load, Load] = {}
        for load in loads:
            if not selected or any(text in load.name for text in selected):
                shrunk = load.shrunk(divisor) if divisor > 1 else load
                sizes.setdefault(replace(shrunk, name="", expected_s=0.0), shrunk)
        if sizes:
            chosen[model] = tuple(sizes.values())
    return chosen


def seed_offset(session: Session, load: Load) -> int:
    """Which prompts of a round `load` has: its own, but all decode loads share theirs (the first N of the largest), so
    that only one of them computes them."""
    names = ["decode" if each.kind == "decode" else each.name for each in session.loads]
    return names.index("decode" if load.kind == "decode" else load.name)


def sessions_of(group: Group, loads: dict[str, tuple[Load, ...]], num_rounds: int, with_peer: bool) -> list[Session]:
    """Who starts when."""
    first, rest = range((num_rounds + 1) // 2), range((num_rounds + 1) // 2, num_rounds)
    rounds = range(num_rounds)
    sessions: list[Session] = []
    for model, its_loads in loads.items():
        if group == "online1b":
            sessions += [
                Session("ours", model, its_loads, first, DEFAULT),
                Session("peer", model, its_loads, rounds, DEFAULT),
                Session("ours", model, its_loads, first, ONE_SERVER),
                Session("peer", model, its_loads, rounds, FOUR_SERVERS),
                *(Session("ours", model, its_loads, rest, variant) for variant in (DEFAULT, ONE_SERVER) if rest),
            ]
        elif group == "online8b":
            # The second start is worth its seconds also where no round is left for it: it is the one with warm caches.
            sessions += [
                Session("ours", model, its_loads, first, cache="empty"),
                Session("peer", model, its_loads, rounds, cache="empty"),
                Session("ours", model, its_loads, rest, cache="kept"),
            ]
        else:
            sessions += [Session("ours", model, its_loads, first), Session("peer", model, its_loads, rounds)]
            sessions += [Session("ours", model, its_loads, rest)] if rest else []
    return sessions if with_peer else _without_peer(sessions)


def _without_peer(sessions: Sequence[Session]) -> list[Session]:
    """Our sessions; those that the peer's came between become one."""
    ours: list[Session] = []
    for session in sessions:
        same = [each for each in ours if replace(each, rounds=session.rounds) == session]
        if session.side == "ours" and same:
            joined = range(same[0].rounds.start, session.rounds.stop)
            ours[ours.index(same[0])] = replace(same[0], rounds=joined)
        elif session.side == "ours":
            ours.append(session)
    return ours


def rows_of(group: Group, loads: dict[str, tuple[Load, ...]], with_peer: bool) -> list[Row]:
    """The table's lines."""
    rows: list[Row] = []
    for model, its_loads in loads.items():
        decodes = [load for load in its_loads if load.kind == "decode"]
        for load in [*(load for load in its_loads if load.kind != "decode"), *reversed(decodes)]:
            rows += _serve_rows(load, with_peer) if load.kind == "serve" else _offline_rows(load)
        if group == "online8b":
            rows.append(Row(f"{model} start to first answer, empty caches, s", START, "empty_s"))
            rows.append(Row(f"{model} start to first answer, warm caches, s", START, "kept_s"))
    return rows


def _offline_rows(load: Load) -> list[Row]:
    if load.kind == "throughput":
        return [Row(f"{load.name}, output tok/s", load.name, "output_tok_s")]
    model = load.name.split()[0]
    rows = [Row(f"{model} decode step, batch {load.num_prompts}, ms", load.name, "step_ms")]
    if load.name.endswith("decode 256"):  # all the prompts, computed before its steps are timed
        rows.append(
            Row(f"{model} prefill of {load.num_prompts} x {load.input_len}, input tok/s", load.name, "input_tok_s")
        )
    return rows


def _serve_rows(load: Load, with_peer: bool) -> list[Row]:
    figures = [
        ("output tok/s", "output_throughput"),
        ("TTFT p50 ms", "p50_ttft_ms"),
        ("TTFT p99 ms", "p99_ttft_ms"),
        ("TPOT p50 ms", "p50_tpot_ms"),
        ("ITL p50 ms", "p50_itl_ms"),
        ("ITL p99 ms", "p99_itl_ms"),
    ]
    rows = [Row(f"{load.name}, {label}", load.name, metric) for label, metric in figures]
    if load.name.startswith("1b"):
        for label, metric in figures:
            rows.append(Row(f"{load.name}, ours with 1 API server, {label}", load.name, metric, ours=ONE_SERVER))
        for label, metric in figures if with_peer else ():
            rows.append(Row(f"{load.name}, peer with 4 API servers, {label}", load.name, metric, peer=FOUR_SERVERS))
    return rows
