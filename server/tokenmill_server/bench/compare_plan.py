"""What `bench compare` measures: the loads of each group, who runs them in which order, and the rows of the table.

    offline    both shapes through each side's `LLM` class: throughput, prefill, time of a decode step
    online8b   an 8B server: full load, a single client, seconds from the command to the first answer
    online1b   a 1B server, where the front end is the limit: default flags, one and several API servers

The two sides cannot share the device's memory, so they take turns: one half of our rounds runs before the peer's and
the other half after them, which shows (and halves) what the machine's drift does to the comparison.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Group = Literal["offline", "online8b", "online1b"]
GROUPS: tuple[Group, ...] = ("offline", "online8b", "online1b")
Side = Literal["ours", "peer"]
Kind = Literal["throughput", "decode", "serve"]
Cache = Literal["default", "empty", "kept"]
"""Kernel caches of a server of ours: those of the machine, new ones, or what the last new ones hold by now."""

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

    def shrunk(self, divisor: int) -> "Load":
        """A `divisor`-th of every size, for small machines."""
        output_len = max(1, self.output_len // divisor)
        return replace(
            self,
            num_prompts=max(1, self.num_prompts // divisor),
            input_len=max(1, self.input_len // divisor),
            output_len=max(output_len, _MIN_DECODE_OUTPUT_LEN) if self.kind == "decode" else output_len,
            concurrency=max(1, self.concurrency // divisor) if self.kind == "serve" else 0,
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
        """Names under which the time of this start is compared. The peer starts once, so it stands beside both."""
        if self.side == "peer":
            return ("empty_s", "kept_s")
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


_DECODES_8B = tuple(
    Load(f"8b decode {size}", "decode", size, 1024, _DECODE_OUTPUT_LEN) for size in (1, 8, 32, 128, 256)
)
_DECODES_1B = tuple(
    Load(f"1b decode {size}", "decode", size, 1024, _DECODE_OUTPUT_LEN) for size in (1, 8, 32, 128, 256)
)
_OFFLINE_8B = (
    Load("8b 256 x 1024/128", "throughput", 256, 1024, 128),
    Load("8b 512 x 128/128", "throughput", 512, 128, 128),
    Load("8b 256 x 1024/1", "throughput", 256, 1024, 1),
    *_DECODES_8B,
)
_OFFLINE_1B = (Load("1b 512 x 128/128", "throughput", 512, 128, 128), *_DECODES_1B)
_ONLINE_8B = (
    Load("8b 256 clients 1024/128", "serve", 768, 1024, 128, 256),
    Load("8b 1 client 1024/128", "serve", 8, 1024, 128, 1),
)
_ONLINE_1B = (Load("1b 256 clients 128/256", "serve", 2048, 128, 256, 256),)

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
                sizes.setdefault(replace(shrunk, name=""), shrunk)
        if sizes:
            chosen[model] = tuple(sizes.values())
    return chosen


def sessions_of(group: Group, loads: dict[str, tuple[Load, ...]], num_rounds: int, with_peer: bool) -> list[Session]:
    """Who starts when. Our first 8B server of a group finds empty kernel caches, the second one what it left."""
    first, rest = range((num_rounds + 1) // 2), range((num_rounds + 1) // 2, num_rounds)
    rounds = range(num_rounds)
    sessions: list[Session] = []
    for model, its_loads in loads.items():
        if group == "online1b":
            ours = [Session("ours", model, its_loads, rounds, variant) for variant in (DEFAULT, ONE_SERVER)]
            peers = [Session("peer", model, its_loads, rounds, variant) for variant in (DEFAULT, FOUR_SERVERS)]
            sessions += [ours[0], peers[0], ours[1], peers[1]] if with_peer else ours
        elif group == "online8b":
            # The second start is worth its seconds also where no round is left for it: it is the one with warm caches.
            sessions += [
                Session("ours", model, its_loads, first, cache="empty"),
                *([Session("peer", model, its_loads, rounds)] if with_peer else []),
                Session("ours", model, its_loads, rest, cache="kept"),
            ]
        elif with_peer:
            sessions += [Session("ours", model, its_loads, first), Session("peer", model, its_loads, rounds)]
            sessions += [Session("ours", model, its_loads, rest)] if rest else []
        else:
            sessions.append(Session("ours", model, its_loads, rounds))
    return sessions


def rows_of(group: Group, loads: dict[str, tuple[Load, ...]], with_peer: bool) -> list[Row]:
    """The table's lines."""
    rows: list[Row] = []
    for model, its_loads in loads.items():
        for load in its_loads:
            rows += _serve_rows(load, with_peer) if load.kind == "serve" else [_offline_row(load)]
        if group == "online8b":
            rows.append(Row(f"{model} start to first answer, empty caches, s", START, "empty_s", peer=DEFAULT))
            rows.append(Row(f"{model} start to first answer, warm caches, s", START, "kept_s", peer=DEFAULT))
    return rows


def _offline_row(load: Load) -> Row:
    if load.kind == "decode":
        return Row(f"{load.name[:2]} decode step, batch {load.num_prompts}, ms", load.name, "step_ms")
    if load.output_len == 1:
        return Row(f"{load.name[:2]} prefill, input tok/s", load.name, "input_tok_s")
    return Row(f"{load.name}, output tok/s", load.name, "output_tok_s")


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
