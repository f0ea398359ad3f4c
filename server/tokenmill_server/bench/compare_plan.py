"""How a comparison goes: loads of pairs of variants, who runs them in which order, and the rows of the table. What each
group measures is in `compare_groups`.

The two sides cannot share the device's memory, so they take turns. Our start takes seconds, the peer's a minute or two,
so it is ours that starts again: one half of our rounds runs before the peer's and the other half after them, which
shows (and halves) what the machine's drift does to the comparison. The peer starts once for each kind of flags.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tokenmill_server.bench.random_images import parse_sizes

Side = Literal["ours", "peer"]
Kind = Literal["throughput", "decode", "serve"]
Cache = Literal["default", "empty", "kept"]
"""Caches of compiled code: those of the machine, new ones of the side, or what these hold by now."""

DEFAULT = "default flags"

START = "start"
"""Name of the measurement that every server yields before its loads."""

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
    image_sizes: str | None = None
    """Sizes as `bench serve --random-mm-sizes` takes them, if a server gets an image with each prompt."""
    warms_up: bool = True
    """Whether a server gets other requests first. Without, all that the engine does meanwhile is the load."""

    def shrunk(self, divisor: int) -> "Load":
        """A `divisor`-th of every size, for small machines."""
        output_len = max(1, self.output_len // divisor)
        return replace(
            self,
            num_prompts=max(1, self.num_prompts // divisor),
            input_len=max(1, self.input_len // divisor),
            output_len=max(output_len, _MIN_DECODE_OUTPUT_LEN) if self.kind == "decode" else output_len,
            concurrency=max(1, self.concurrency // divisor) if self.kind == "serve" else 0,
            image_sizes=_shrunk_sizes(self.image_sizes, divisor),
            expected_s=self.expected_s / divisor,
        )


def _shrunk_sizes(sizes: str | None, divisor: int) -> str | None:
    return None if sizes is None else ",".join(str(each.divided(divisor)) for each in parse_sizes(sizes))


@dataclass(slots=True, frozen=True)
class Pairing:
    """A variant of ours beside one of the peer's, under the same loads. Both sides know the same flags."""

    loads: tuple[Load, ...]
    ours: str = DEFAULT
    """Flags beside the common ones, or DEFAULT."""
    peer: str | None = DEFAULT
    """None: ours alone."""
    label: str = ""
    """What the rows of the table call it."""
    num_devices: int = 1
    """Over which each copy of the model is spread."""
    shows_idle: bool = False
    """Whether there is a row about the time in which devices are idle. For loads that do not warm up."""
    times_first: int = 0
    """A row compares the output rate with this many times that of the first pairing; 0: none does."""

    def chosen(self, selected: Sequence[str], divisor: int) -> "Pairing":
        """Those loads whose names contain one of the texts, none means all, with a `divisor`-th of every size. Of loads
        that become equal the first one stays."""
        sizes: dict[Load, Load] = {}
        for load in self.loads:
            if not selected or any(text in load.name for text in selected):
                shrunk = load.shrunk(divisor) if divisor > 1 else load
                sizes.setdefault(replace(shrunk, name="", expected_s=0.0), shrunk)
        return replace(self, loads=tuple(sizes.values()))


@dataclass(slots=True, frozen=True)
class ModelPlan:
    """What a group measures with one model."""

    model: str
    """`8b`, `1b`, `70b` or `vl7b`."""
    pairings: tuple[Pairing, ...]
    compares_starts: bool = False

    def chosen(self, selected: Sequence[str], divisor: int) -> "ModelPlan":
        """See `Pairing.chosen`; pairings without loads are left out."""
        pairings = (pairing.chosen(selected, divisor) for pairing in self.pairings)
        return replace(self, pairings=tuple(pairing for pairing in pairings if pairing.loads))


@dataclass(slots=True, frozen=True)
class Session:
    """One start of one side, and the rounds that it runs before it ends."""

    side: Side
    model: str
    loads: tuple[Load, ...]
    rounds: range
    variant: str = DEFAULT
    """The flags beside the common ones, or DEFAULT."""
    cache: Cache = "default"
    num_devices: int = 1

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
class Base:
    """What the figure of a row is divided by: `times` the same figure of another load."""

    load: str
    ours: str
    peer: str | None
    times: int


@dataclass(slots=True, frozen=True)
class Row:
    """One line of the table: a figure of one load, ours beside the peer's."""

    title: str
    load: str
    metric: str
    ours: str = DEFAULT
    """Our variant."""
    peer: str | None = DEFAULT
    base: Base | None = None


def seed_offset(session: Session, load: Load) -> int:
    """Which prompts of a round `load` has: its own, but all decode loads share theirs (the first N of the largest), so
    that only one of them computes them."""
    names = ["decode" if each.kind == "decode" else each.name for each in session.loads]
    return names.index("decode" if load.kind == "decode" else load.name)


# --- turns --------------------------------------------------------------------------------------------------------


def sessions_of(plans: Sequence[ModelPlan], num_rounds: int, with_peer: bool) -> list[Session]:
    """Who starts when."""
    first, rest = range((num_rounds + 1) // 2), range((num_rounds + 1) // 2, num_rounds)
    sessions: list[Session] = []
    for plan in plans:
        caches: tuple[Cache, Cache] = ("empty", "kept") if plan.compares_starts else ("default", "default")
        sessions += _turns(plan, first, range(num_rounds), caches[0])
        # The second start is worth its seconds also where no round is left for it, if starts are compared.
        if rest or plan.compares_starts:
            sessions += [each for each in _turns(plan, rest, rest, caches[1]) if each.side == "ours"]
    return sessions if with_peer else _without_peer(sessions)


def _turns(plan: ModelPlan, ours: range, peer: range, cache: Cache = "default") -> list[Session]:
    """One start of every variant of both sides; what a variant measures in several pairings it measures once."""
    turns: dict[tuple[Side, str], Session] = {}
    for pairing in plan.pairings:
        starts: list[tuple[Side, str | None, range]] = [("ours", pairing.ours, ours), ("peer", pairing.peer, peer)]
        for side, variant, rounds in starts:
            if variant is not None:
                new = Session(side, plan.model, (), rounds, variant, cache, pairing.num_devices)
                session = turns.get((side, variant), new)
                loads = tuple(dict.fromkeys((*session.loads, *pairing.loads)))
                turns[side, variant] = replace(session, loads=loads)
    return list(turns.values())


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


# --- rows ---------------------------------------------------------------------------------------------------------

_RATE = ("output tok/s", "output_throughput")
_SERVE_FIGURES = (
    _RATE,
    ("TTFT p50 ms", "p50_ttft_ms"),
    ("TTFT p99 ms", "p99_ttft_ms"),
    ("TPOT p50 ms", "p50_tpot_ms"),
    ("ITL p50 ms", "p50_itl_ms"),
    ("ITL p99 ms", "p99_itl_ms"),
)


def rows_of(plans: Sequence[ModelPlan], with_peer: bool) -> list[Row]:
    """The table's lines."""
    rows: list[Row] = []
    for plan in plans:
        for index, pairing in enumerate(plan.pairings):
            if with_peer or all(pairing.ours != earlier.ours for earlier in plan.pairings[:index]):
                rows += _pairing_rows(plan, pairing)
        if plan.compares_starts:
            rows.append(Row(f"{plan.model} start to first answer, empty caches, s", START, "empty_s"))
            rows.append(Row(f"{plan.model} start to first answer, warm caches, s", START, "kept_s"))
    return rows


def _pairing_rows(plan: ModelPlan, pairing: Pairing) -> list[Row]:
    rows: list[Row] = []

    def add(load: Load, what: str, figure: str, metric: str, base: Base | None = None) -> None:
        title = ", ".join(word for word in (what, pairing.label, figure) if word)
        rows.append(Row(title, load.name, metric, pairing.ours, pairing.peer, base))

    decodes = [load for load in pairing.loads if load.kind == "decode"]
    for load in [*(load for load in pairing.loads if load.kind != "decode"), *reversed(decodes)]:
        if load.kind == "throughput":
            add(load, load.name, "output tok/s", "output_tok_s")
        elif load.kind == "decode":
            step = f"{plan.model} decode step, batch {load.num_prompts}"
            add(load, step, "ms", "step_ms")
            add(load, step, "share of the memory bandwidth", "bandwidth_share")
            if load.name.endswith("decode 256"):  # all the prompts, computed before its steps are timed
                prefill = f"{plan.model} prefill of {load.num_prompts} x {load.input_len}"
                add(load, prefill, "input tok/s", "input_tok_s")
        else:
            for figure, metric in _SERVE_FIGURES:
                add(load, load.name, figure, metric)
            if load.image_sizes is not None:
                add(load, load.name, "encoder's share of the steps", "encoder_share")
            if pairing.shows_idle:
                add(load, load.name, "idle share of the slowest stage", "idle_share")
            if pairing.times_first and plan.pairings[0] is not pairing:
                first = plan.pairings[0]
                base = Base(first.loads[0].name, first.ours, first.peer, pairing.times_first)
                whole = first.label if base.times == 1 else f"{base.times} x {first.label}"
                add(load, load.name, f"{_RATE[0]} by {whole}", _RATE[1], base)
    return rows
