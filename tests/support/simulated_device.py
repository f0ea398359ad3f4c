"""An executor that computes nothing and says how long a device with known costs would have taken.

Time is simulated: a step ends when the device, which does one after the other, is done with it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from tokenmill_engine.outputs import StepPlan, StepResult
from tokenmill_engine.scheduler.cost_model import StepWork, work_of

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


def gaps(streams: Iterable[Stream]) -> list[float]:
    """Seconds between tokens, of all streams."""
    return [after - before for s in streams for before, after in zip(s.token_times, s.token_times[1:], strict=False)]
