"""An executor that computes nothing and says how long a device with known costs would have taken.

Time is simulated: a step ends when the device, which does one after the other, is done with it. `Effects` are what a
card under load and its host do beyond the sum of costs.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tests.support.api_server import engine_config
from tokenmill_engine.config.engine import SchedulerConfig
from tokenmill_engine.engine import EngineCore
from tokenmill_engine.ipc.ids import make_request_id
from tokenmill_engine.kv_cache.spec import KVSpec, group_layers
from tokenmill_engine.messages import AddRequest, SamplingParams, StepOutput
from tokenmill_engine.outputs import KVCapacity, StepPlan, StepResult, TokenMasks
from tokenmill_engine.scheduler.cost_model import StepWork, work_of
from tokenmill_engine.worker.shapes import MAX_GRAPH_TOKENS, Ladder

_CHECKED_STEPS = 64
"""Invariants are checked after every so many steps: looking at every block of a large pool takes longer than a step."""
TOKEN = 5
"""What every row samples."""


@dataclass(frozen=True)
class Costs:
    """Seconds of a step: a line through `base` (tokens, seconds), and attention."""

    base: tuple[tuple[int, float], ...]
    decode_per_token: float
    prefill_per_pair: float

    def base_seconds(self, num_tokens: int) -> float:
        tokens, seconds = zip(*self.base, strict=True)
        return float(np.interp(num_tokens, tokens, seconds))

    def seconds(self, work: StepWork) -> float:
        attention = self.decode_per_token * work.decode_context + self.prefill_per_pair * work.prefill_context
        return self.base_seconds(work.num_tokens) + attention

    def prefill_costs(self, sizes: Iterable[int], prompt_len: int = 0) -> tuple[tuple[int, float], ...]:
        """What a worker would measure at its start with prompts of at most `prompt_len` tokens; 0: no attention."""
        works = (StepWork(size, 0, size * min(size, prompt_len) / 2) for size in sizes)
        return tuple((work.num_tokens, self.seconds(work)) for work in works)


H100_8B = Costs(
    base=(
        *((1, 5.65e-3), (32, 5.76e-3), (128, 6.15e-3), (256, 7.02e-3), (512, 11.9e-3), (1024, 21.2e-3)),
        *((2048, 47.6e-3), (8192, 173.6e-3)),
    ),
    decode_per_token=12.8e-3 / (256 * 1088),
    prefill_per_pair=1.5e-9,
)
"""An 8B model on an H100: 1024 rows are multiplied faster than 2048."""

H100_8B_FLAT = Costs(
    base=(
        *((1, 5.3e-3), (32, 5.5e-3), (128, 6.15e-3), (256, 8.06e-3), (512, 11.23e-3), (1024, 19.62e-3)),
        *((2048, 37.07e-3), (4096, 73.75e-3), (8192, 154.1e-3)),
    ),
    decode_per_token=12.8e-3 / (256 * 1088),
    prefill_per_pair=1.3e-9,
)
"""The same with other matrix products: what the card measured at a start with prompts of up to 2048 tokens (8.1, 11.4,
20.3, 39.8, 79.2 and 165 ms from 256 to 8192 tokens) less their attention. A token costs 5.5 % less in a step of 2048
than in one of 1024, and 12.6 % less there than in one of 512."""

CPU_135M = Costs(
    base=((1, 3.8e-3), (8, 6.8e-3), (16, 8.6e-3), (32, 18.5e-3), (256, 65e-3), (2048, 640e-3)),
    decode_per_token=1e-6,
    prefill_per_pair=2e-8,
)


@dataclass(frozen=True)
class Effects:
    """What makes steps of a loaded card take longer than the sum of their costs. The defaults do nothing."""

    mixed_step_s: float = 0.0
    """A step of decodes and prompts takes so much longer than one of as many prompt tokens."""
    mixed_decodes: float = 1.0
    """Beside prompts, attention of decodes takes so many times as long."""
    are_padded: bool = False
    """A step takes as long as the CUDA graph in which it runs."""
    heat: float = 0.0
    """How much longer products take once a large step has run for seconds on end; small steps heat less."""
    drift: float = 0.0
    """Standard deviation of what clocks wander by within half a second."""
    graph_launch_s: float = 0.0
    """Host time to enqueue a step that has a graph, during which the device may have to wait."""
    eager_launch_s: float = 0.0
    """The same for a step that has none."""
    request_s: float = 0.0
    """Host time for each request that arrives."""
    commit_s: float = 0.0
    """Host time for each step that ended."""


NO_EFFECTS = Effects()
EFFECTS = {
    "none": NO_EFFECTS,
    "mixed steps take 0.8 ms more": Effects(mixed_step_s=0.8e-3),
    "mixed steps take 1.2 ms more": Effects(mixed_step_s=1.2e-3),
    "decode attention takes 1.2 times as long beside prompts": Effects(mixed_decodes=1.2),
    "steps are padded to their graphs": Effects(are_padded=True),
    "products slow down by 8 %": Effects(heat=0.08),
    "products slow down by 15 %": Effects(heat=0.15),
    "clocks wander by 3 %": Effects(drift=0.03),
    "clocks wander by 5 %": Effects(drift=0.05),
    "the host takes its time": Effects(graph_launch_s=1.1e-3, eager_launch_s=37e-3, request_s=0.2e-3, commit_s=1.5e-3),
    "all of it, less of each": Effects(
        mixed_step_s=0.4e-3,
        mixed_decodes=1.1,
        are_padded=True,
        heat=0.06,
        drift=0.02,
        graph_launch_s=1.1e-3,
        eager_launch_s=37e-3,
        request_s=0.2e-3,
        commit_s=1.5e-3,
    ),
}
"""What may make a default budget drift, one after the other and together: guesses at what an H100 does."""

_HEATING_S, _DRIFTING_S = 2.0, 0.5
_SHARES_OF_HEAT = (64, 256, 512, 1024), (0.0, 0.7, 0.9, 1.0)
"""Tokens of a step, and how far it slows down when it is hot."""


@dataclass
class SimulatedDevice:
    """Honours the `Executor` protocol. `noise(step)` is what a step's time is multiplied with."""

    costs: Costs
    noise: Callable[[int], float] = lambda step: 1.0
    effects: Effects = NO_EFFECTS
    max_num_seqs: int = 256
    now_s: float = 0.0
    """Of the host."""
    works: list[StepWork] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Seconds of each step."""
    plans: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ladder = Ladder(self.max_num_seqs, MAX_GRAPH_TOKENS)
        self._generator = np.random.default_rng(2)
        self._free_s = 0.0
        """When the last step ends that was submitted."""
        self._heat = self._drift = 0.0

    def submit(self, plan: StepPlan) -> "SimulatedStep":
        shape = self._ladder.padded(plan)
        work = work_of(plan)
        num_tokens = shape.num_tokens if shape is not None and self.effects.are_padded else work.num_tokens
        busy_s = self._seconds(num_tokens, work, 0 < plan.num_decodes < plan.num_reqs) * self.noise(plan.step)
        started_s = max(self.now_s, self._free_s)
        self.now_s += self.effects.eager_launch_s if shape is None else self.effects.graph_launch_s
        # Events on the device: from when enqueueing began or the step before ended.
        self._free_s = max(started_s + busy_s, self.now_s)
        self._wander(busy_s, num_tokens)
        self.works.append(work)
        self.plans.append(plan)
        self.times.append(self._free_s - started_s)
        return SimulatedStep(self, plan, self.times[-1], self._free_s)

    def mask(self, masks: TokenMasks | None) -> None:
        """No request here has a grammar."""

    def shutdown(self) -> None:
        """Nothing is held."""

    def _seconds(self, num_tokens: int, work: StepWork, is_mixed: bool) -> float:
        costs, effects = self.costs, self.effects
        slowdown = (1.0 + self._heat * float(np.interp(num_tokens, *_SHARES_OF_HEAT))) * (1.0 + self._drift)
        decodes_s = costs.decode_per_token * work.decode_context * (effects.mixed_decodes if is_mixed else 1.0)
        products_s = costs.base_seconds(num_tokens) + costs.prefill_per_pair * work.prefill_context
        return products_s * slowdown + decodes_s + effects.mixed_step_s * is_mixed

    def _wander(self, busy_s: float, num_tokens: int) -> None:
        """Heat and clocks after a step."""
        limit = self.effects.heat * float(np.interp(num_tokens, *_SHARES_OF_HEAT))
        self._heat += (limit - self._heat) * min(1.0, busy_s / _HEATING_S)
        if self.effects.drift:
            kept = float(np.exp(-busy_s / _DRIFTING_S))
            self._drift *= kept
            self._drift += self.effects.drift * float(np.sqrt(1.0 - kept * kept) * self._generator.standard_normal())


@dataclass
class SimulatedStep:
    """A step on the simulated device."""

    device: SimulatedDevice
    plan: StepPlan
    elapsed_s: float
    ended_s: float

    def result(self) -> StepResult:
        self.device.now_s = max(self.device.now_s, self.ended_s) + self.device.effects.commit_s
        token_ids = np.where(self.plan.samples, TOKEN, -1).astype(np.int32)[:, np.newaxis]
        num_new = self.plan.samples.astype(np.int32)
        return StepResult(self.plan.step, token_ids, num_new, elapsed_s=self.elapsed_s)


@dataclass
class Stream:
    """One request of a closed loop, as its client sees it."""

    arrived_s: float
    token_times: list[float] = field(default_factory=list)


@dataclass
class ClosedLoop:
    """Clients that send a request each, and the next one when it is answered, to an engine on a simulated device."""

    costs: Costs
    scheduler: SchedulerConfig
    input_len: int
    output_len: int
    measured: bool = True
    """Whether the worker measured its costs at the start."""
    start_costs: tuple[tuple[int, float], ...] | None = None
    """What it measured then, if not the truth."""
    noise: Callable[[int], float] = lambda step: 1.0
    num_blocks: int = 10_000
    effects: Effects = NO_EFFECTS
    streams: dict[int, Stream] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device = SimulatedDevice(self.costs, self.noise, self.effects, self.scheduler.max_num_seqs)
        sizes = [256 << power for power in range(6) if 256 << power <= self.scheduler.max_num_batched_tokens]
        capacity = KVCapacity(
            num_blocks=self.num_blocks,
            block_size=16,
            max_model_len=8192,
            kv_cache_bytes=0,
            groups=group_layers([KVSpec("full", 1, 8, "float32")]),
            attention_backend="simulated",
            phases={},
            prefill_costs=self._measure(sizes) if self.measured else (),
        )
        config = dataclasses.replace(engine_config(), scheduler=self.scheduler)
        self.core = EngineCore(config, self.device, capacity)
        self._generator = np.random.default_rng(0)
        self._last_request = 0

    def _measure(self, sizes: Iterable[int]) -> tuple[tuple[int, float], ...]:
        return self.costs.prefill_costs(sizes) if self.start_costs is None else self.start_costs

    def run(self, num_clients: int, num_requests: int) -> "ClosedLoop":
        """Answer `num_requests` requests, `num_clients` at a time. May be called again, for more."""
        self._last_request = len(self.streams) + num_requests
        for _ in range(min(num_clients, num_requests)):
            self._send()
        while self.core.has_work:
            outputs = self.core.step()
            if len(self.device.plans) % _CHECKED_STEPS == 0:
                self.core.scheduler.check_invariants()
            for _, message in outputs:
                if isinstance(message, StepOutput):
                    self._take(message)
        return self

    @property
    def tokens_per_s(self) -> float:
        return sum(len(stream.token_times) for stream in self.streams.values()) / self.device.now_s

    @property
    def gaps(self) -> NDArray[np.float64]:
        """Seconds between tokens, of all streams."""
        return np.concatenate([np.diff(stream.token_times) for stream in self.streams.values()])

    def mixed_steps(self) -> Iterator[tuple[StepPlan, float]]:
        """Steps with decodes and other rows, and their seconds."""
        for plan, seconds in zip(self.device.plans, self.device.times, strict=True):
            if 0 < plan.num_decodes < plan.num_reqs:
                yield plan, seconds

    def _send(self) -> None:
        request_id = make_request_id(0, 0, len(self.streams))
        prompt = self._generator.integers(10, 1000, size=self.input_len, dtype=np.int32)
        sampling = SamplingParams(max_tokens=self.output_len, ignore_eos=True)
        self.streams[request_id] = Stream(self.device.now_s)
        self.device.now_s += self.effects.request_s
        self.core.handle(AddRequest(request_id, "simulated", prompt.tobytes(), sampling, self.device.now_s))

    def _take(self, message: StepOutput) -> None:
        for request_id in np.frombuffer(message.request_ids, "<i8").tolist():
            self.streams[request_id].token_times.append(self.device.now_s)
        for _ in message.finishes:
            if len(self.streams) < self._last_request:
                self._send()


def gaussian_noise(deviation: float, outliers: float = 0.0) -> Callable[[int], float]:
    """Factors on the times of steps; a share of `outliers` waits for 1 to 10 times as long."""
    generator = np.random.default_rng(1)
    factors = 1.0 + deviation * generator.standard_normal(100_000)
    late = generator.random(len(factors)) < outliers
    factors[late] *= generator.uniform(2.0, 11.0, size=int(late.sum()))
    return lambda step: float(factors[step])
