"""Drives a worker or an executor with step plans, as a scheduler would but without its policies."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.outputs import BlockAppend, LogprobRows, SlotStart, StepPlan, StepResult
from tokenmill_engine.worker.worker import Worker


class Handle(Protocol):
    def result(self) -> StepResult: ...


GREEDY = SamplingParams(temperature=0.0, seed=0)


@dataclass
class Generation:
    """One request and what became of it."""

    prompt: Sequence[int]
    max_tokens: int
    sampling: SamplingParams = GREEDY
    stop_token_ids: tuple[int, ...] = ()
    output: list[int] = field(default_factory=list)
    logprobs: list[LogprobRows] = field(default_factory=list)
    prompt_logprobs: list[LogprobRows] = field(default_factory=list)
    error: str | None = None
    num_preemptions: int = 0

    @property
    def finished(self) -> bool:
        stopped = bool(self.output) and self.output[-1] in self.stop_token_ids
        return stopped or len(self.output) >= self.max_tokens or self.error is not None


@dataclass
class _Submitted:
    result: Callable[[], StepResult]


@dataclass
class _Running:
    generation: Generation
    request_id: int
    slot: int
    block_ids: list[int]
    num_sent_blocks: int
    num_computed: int
    """Optimistic, as `num_tokens`."""
    num_tokens: int
    started: bool = False


class StepDriver:
    """Blocks and slots are handed out in a scrambled order, so that wrong tables show."""

    def __init__(
        self,
        submit: Callable[[StepPlan], Handle],
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        budget: int = 2048,
        depth: int = 1,
    ) -> None:
        """`depth` steps are in flight at once; `budget` tokens go into a step."""
        self._submit = submit
        self._block_size = block_size
        self._budget = budget
        self._depth = depth
        rng = np.random.default_rng(0)
        self._free_blocks = rng.permutation(num_blocks).tolist()
        self._free_slots = rng.permutation(num_slots).tolist()
        self._running: list[_Running] = []
        self._step = 0
        self._next_id = 0
        self.plans: list[StepPlan] = []

    @classmethod
    def of_worker(cls, worker: Worker, **arguments: int) -> "StepDriver":
        """Drives a worker itself; its results are taken when they are due."""
        return cls(lambda plan: _Submitted(worker.execute(plan).wait), **arguments)

    def run(self, generations: Sequence[Generation], *, preempt_every: int = 0) -> None:
        """Generate to the end of all. With `preempt_every` n a request loses its place every n steps, each request at
        most twice (which needs depth 1)."""
        waiting = deque(generations)
        in_flight: deque[tuple[StepPlan, list[_Running], Handle]] = deque()
        while waiting or self._running or in_flight:
            if preempt_every and self._step % preempt_every == preempt_every - 1:
                waiting.extend(self._preempt())
                self._step += 1
            self._admit(waiting)
            plan, rows = self._plan()
            if plan is not None:
                self.plans.append(plan)
                in_flight.append((plan, rows, self._submit(plan)))
            if in_flight and (len(in_flight) >= self._depth or plan is None):
                self._commit(*in_flight.popleft())

    def _admit(self, waiting: deque[Generation]) -> None:
        while waiting and self._free_slots:
            generation = waiting[0]
            longest = len(generation.prompt) + generation.max_tokens + self._depth
            if self._num_blocks(longest) > len(self._free_blocks):
                break
            waiting.popleft()
            known = len(generation.prompt) + len(generation.output)
            blocks = [self._free_blocks.pop() for _ in range(self._num_blocks(longest))]
            self._running.append(_Running(generation, self._next_id, self._free_slots.pop(), blocks, 0, 0, known))
            self._next_id += 1

    def _preempt(self) -> list[Generation]:
        victims = [running for running in self._running if running.generation.num_preemptions < 2][:1]
        for running in victims:
            running.generation.num_preemptions += 1
            self._release(running)
        return [running.generation for running in victims]

    def _release(self, running: _Running) -> None:
        self._running.remove(running)
        self._free_blocks.extend(running.block_ids)
        self._free_slots.append(running.slot)

    def _plan(self) -> tuple[StepPlan | None, list[_Running]]:
        budget = self._budget
        work: list[tuple[_Running, int, bool]] = []
        for running in self._running:
            generation = running.generation
            num_output = running.num_tokens - len(generation.prompt)
            pending = running.num_tokens - running.num_computed
            count = 0 if num_output >= max(1, generation.max_tokens) else min(pending, budget)
            if count > 0:
                work.append((running, count, count == pending))
                budget -= count
        if not work:
            return None, []
        work.sort(key=lambda item: not (item[1] == 1 and item[2]))
        rows = [running for running, _, _ in work]
        starts: list[SlotStart] = []
        appends: list[BlockAppend] = []
        for running, count, _ in work:
            self._move_blocks(running, running.num_computed + count, starts, appends)
        plan = StepPlan(
            step=self._step,
            slots=np.array([running.slot for running in rows], np.int32),
            num_scheduled=np.array([count for _, count, _ in work], np.int32),
            num_computed=np.array([running.num_computed for running in rows], np.int32),
            samples=np.array([samples for _, _, samples in work]),
            num_decodes=sum(count == 1 and samples for _, count, samples in work),
            starts=starts,
            appends=appends,
        )
        self._step += 1
        for running, count, samples in work:
            running.num_computed += count
            running.num_tokens += samples
        return plan, rows

    def _move_blocks(
        self, running: _Running, num_tokens: int, starts: list[SlotStart], appends: list[BlockAppend]
    ) -> None:
        """Tell the worker of a new request, or of the blocks that it needs now and does not know yet."""
        generation, first = running.generation, running.num_sent_blocks
        new = running.block_ids[first : self._num_blocks(num_tokens)]
        running.num_sent_blocks += len(new)
        if running.started:
            if new:
                appends.append(BlockAppend(running.slot, 0, first, new))
            return
        running.started = True
        starts.append(
            SlotStart(
                slot=running.slot,
                request_id=running.request_id,
                token_ids=np.array([*generation.prompt, *generation.output], np.int32),
                num_prompt_tokens=len(generation.prompt),
                num_computed_tokens=0,
                block_ids=(new,),
                sampling=generation.sampling,
                stop_token_ids=generation.stop_token_ids,
            )
        )

    def _commit(self, plan: StepPlan, rows: list[_Running], handle: Handle) -> None:
        result = handle.result()
        assert result.step == plan.step
        for row, running in enumerate(rows):
            generation = running.generation
            if running not in self._running:
                continue
            generation.error = result.errors.get(row)
            if row in result.prompt_logprobs:
                generation.prompt_logprobs.append(result.prompt_logprobs[row])
            new = int(result.num_new[row])
            assert new == (plan.samples[row] and generation.error is None)
            generation.output.extend(result.token_ids[row, :new].tolist())
            if row in result.logprobs:
                generation.logprobs.append(result.logprobs[row])
            if generation.finished:
                self._release(running)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
