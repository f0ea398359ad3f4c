"""The fake executor in stages: every stage does one step after the other, and the first knows only what it was told.

The first stage begins a step when it is submitted, with the tokens that were sent to it by then; that it has all those
it needs is asserted. Time is simulated: a step takes each stage the same, a stage begins it when the one before is done
with it and with what came before it, and the host waits for results and takes no time.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tests.support.fake_executor import FakeExecutor, FakeHandle
from tokenmill_engine.executor.feedback import TokenFeedback
from tokenmill_engine.outputs import StepPlan, StepResult


@dataclass
class SimulatedPipeline(FakeExecutor):
    """`num_stages` stages, each of which a step takes `seconds(plan)`."""

    num_stages: int = 2
    seconds: Callable[[StepPlan], float] = lambda plan: 1.0
    host_s: float = 0.0
    """From the end of a step to when the host submits the next one."""
    now_s: float = 0.0
    """Of the host."""
    busy_s: float = 0.0
    """Of each stage."""
    most_in_flight: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._feedback = TokenFeedback()
        self._known: dict[int, set[int]] = {}
        """By slot, the positions whose tokens the first stage has."""
        self._waits: dict[int, int] = {}
        """By slot, the step in flight that samples for the request in it."""
        self._free_s = [0.0] * self.num_stages
        """When each stage is done with the steps submitted."""
        self._ends_s: dict[int, float] = {}

    def submit(self, plan: StepPlan) -> FakeHandle:
        sampled = self._feedback.sent(plan)
        if sampled is not None:
            for slot, position in zip(sampled.slots.tolist(), sampled.positions.tolist(), strict=True):
                assert position not in self._known[slot]
                self._known[slot].add(position)
        for start in plan.starts:
            self._known[start.slot] = set(range(len(start.token_ids)))
            self._waits.pop(start.slot, None)
        for append in plan.known:
            # The token in front of these may come later.
            self._known[append.slot].update(range(append.start, append.start + len(append.token_ids)))
        ends = plan.num_computed + plan.num_scheduled
        for slot, end, samples in zip(plan.slots.tolist(), ends.tolist(), plan.samples.tolist(), strict=True):
            assert slot not in self._waits, "computed again before its token is known"
            assert self._known[slot].issuperset(range(end))
            if samples:
                self._waits[slot] = plan.step
        begin_s = self.now_s
        for stage, free_s in enumerate(self._free_s):
            begin_s = self._free_s[stage] = max(begin_s, free_s) + self.seconds(plan)
        self._ends_s[plan.step] = begin_s
        self.busy_s += self.seconds(plan)
        self.most_in_flight = max(self.most_in_flight, len(self._ends_s))
        return super().submit(plan)

    def run_until(self, plan: StepPlan) -> StepResult:
        self.now_s = max(self.now_s, self._ends_s.pop(plan.step)) + self.host_s
        self._waits = {slot: step for slot, step in self._waits.items() if step != plan.step}
        result = super().run_until(plan)
        self._feedback.received(plan, result)
        return result
