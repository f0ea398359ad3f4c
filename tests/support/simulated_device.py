"""An executor that computes nothing and says how long a device with known costs would have taken.

Time is simulated: a step ends when the device, which does one after the other, is done with it.
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
from tokenmill_engine.outputs import KVCapacity, StepPlan, StepResult
from tokenmill_engine.scheduler.cost_model import StepWork, work_of

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

    def seconds(self, work: StepWork) -> float:
        tokens, seconds = zip(*self.base, strict=True)
        attention = self.decode_per_token * work.decode_context + self.prefill_per_pair * work.prefill_context
        return float(np.interp(work.num_tokens, tokens, seconds)) + attention

    def prefill_costs(self, sizes: Iterable[int]) -> tuple[tuple[int, float], ...]:
        """What a worker would measure at its start."""
        return tuple((size, self.seconds(StepWork(size))) for size in sizes)


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
        *((1, 5.65e-3), (32, 5.76e-3), (128, 6.15e-3), (256, 7.96e-3), (512, 11.07e-3), (1024, 20.19e-3)),
        *((2048, 39.85e-3), (4096, 80.52e-3), (8192, 167.75e-3)),
    ),
    decode_per_token=12.8e-3 / (256 * 1088),
    prefill_per_pair=1.5e-9,
)
"""The same with other matrix products: a token costs 1.3 % more in a step of 1024 than in one of 2048."""

CPU_135M = Costs(
    base=((1, 3.8e-3), (8, 6.8e-3), (16, 8.6e-3), (32, 18.5e-3), (256, 65e-3), (2048, 640e-3)),
    decode_per_token=1e-6,
    prefill_per_pair=2e-8,
)


@dataclass
class SimulatedDevice:
    """Honours the `Executor` protocol. `noise(step)` is what a step's time is multiplied with."""

    costs: Costs
    noise: Callable[[int], float] = lambda step: 1.0
    now_s: float = 0.0
    """When the last step ended that was waited for."""
    works: list[StepWork] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Seconds of each step."""
    plans: list[StepPlan] = field(default_factory=list)

    def submit(self, plan: StepPlan) -> "SimulatedStep":
        work = work_of(plan)
        self.works.append(work)
        self.plans.append(plan)
        self.times.append(self.costs.seconds(work) * self.noise(plan.step))
        return SimulatedStep(self, plan, self.times[-1])

    def shutdown(self) -> None:
        """Nothing is held."""


@dataclass
class SimulatedStep:
    """A step on the simulated device."""

    device: SimulatedDevice
    plan: StepPlan
    elapsed_s: float

    def result(self) -> StepResult:
        self.device.now_s += self.elapsed_s
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
    streams: dict[int, Stream] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device = SimulatedDevice(self.costs, self.noise)
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

    def _measure(self, sizes: Iterable[int]) -> tuple[tuple[int, float], ...]:
        return self.costs.prefill_costs(sizes) if self.start_costs is None else self.start_costs

    def run(self, num_clients: int, num_requests: int) -> "ClosedLoop":
        """Answer `num_requests` requests, `num_clients` at a time."""
        for _ in range(min(num_clients, num_requests)):
            self._send()
        while self.core.has_work:
            outputs = self.core.step()
            if len(self.device.plans) % _CHECKED_STEPS == 0:
                self.core.scheduler.check_invariants()
            for _, message in outputs:
                if isinstance(message, StepOutput):
                    self._take(message, num_requests)
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
        self.core.handle(AddRequest(request_id, "simulated", prompt.tobytes(), sampling, self.device.now_s))

    def _take(self, message: StepOutput, num_requests: int) -> None:
        for request_id in np.frombuffer(message.request_ids, "<i8").tolist():
            self.streams[request_id].token_times.append(self.device.now_s)
        for _ in message.finishes:
            if len(self.streams) < num_requests:
                self._send()


def gaussian_noise(deviation: float, outliers: float = 0.0) -> Callable[[int], float]:
    """Factors on the times of steps; a share of `outliers` waits for 1 to 10 times as long."""
    generator = np.random.default_rng(1)
    factors = 1.0 + deviation * generator.standard_normal(100_000)
    late = generator.random(len(factors)) < outliers
    factors[late] *= generator.uniform(2.0, 11.0, size=int(late.sum()))
    return lambda step: float(factors[step])
