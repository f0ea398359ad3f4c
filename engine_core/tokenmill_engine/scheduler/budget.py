"""How many tokens a step may compute. A policy decides; which one follows from the flags:

* `--max-num-batched-tokens` alone, and `LLM` on a GPU: every step may compute that many.
* `--target-itl-ms`: a step in which requests decode takes as many prompt tokens as keep its predicted time within the
  target; at least `MIN_PREFILL_TOKENS`, so that prompts never starve.
* neither: a step in which requests decode takes the smallest number of tokens at which a token costs at most 5 %
  more than at the best one.

A step in which nothing decodes may always compute `max_num_batched_tokens`: nobody waits for its end. No policy
changes what is computed, only when.
"""

import logging
import time
from collections.abc import Callable
from typing import Protocol

from tokenmill_engine.config.engine import SchedulerConfig
from tokenmill_engine.outputs import StepPlan
from tokenmill_engine.scheduler.cost_model import PrefillCosts, SizeCost, StepCostModel, context_pairs, work_of

logger = logging.getLogger(__name__)

MIN_PREFILL_TOKENS = 32
"""Prompt tokens that a step may compute whatever decodes beside them, within `max_num_batched_tokens`."""

_MOST_LOSS = 0.05
"""A token of a full mixed step may cost so much more than at the best size. Twice the size doubles the time between
tokens: it has to give more for that than a difference which cards and clocks make from one start to the next."""
_BENEFIT, _BENEFIT_IN_USE = 0.5, 1.5
"""Standard deviations of doubt that speak for a smaller budget, and for the one in use before a larger one."""
_START_ERROR = 0.15
"""Sizes that seem to be worse by no more are visited a few times, whatever the start said about them."""
_NUM_VISITS = 6
_STALE_STEPS = 2000
"""Mixed steps after which the last of these visits is forgotten, and the next one due."""
_HOPE = 2.0
"""Standard deviations of doubt that suffice for a visit in any case."""
_FIRST_VISITS_LOSS, _VISITS_LOSS = 0.015, 0.005
"""Throughput that visits of smaller sizes may cost, the first few and from then on."""
_MOST_VISITS = 0.25
"""Share of all tokens of mixed steps that such visits may have, however little they cost."""
_FIRST_LARGE_VISIT, _LARGE_VISIT_INTERVAL = 32, 250
"""Mixed steps until the next larger size may be visited, and from one such visit to the next. Running streams notice:
it has to be far fewer than 1 of 100 steps."""
_SAFETY = 2.5
"""Standard deviations that a step may take longer than predicted and still keep the target."""
_WARNING_INTERVAL_S = 60.0


class Allowance:
    """What one step may still compute, beside `num_decodes` rows of one token that it has granted already."""

    __slots__ = ("num_decodes", "num_left")

    def __init__(self, num_tokens: int, num_decodes: int) -> None:
        self.num_decodes = min(num_decodes, num_tokens)
        self.num_left = num_tokens - self.num_decodes

    def grant(self, num_pending: int, num_computed: int) -> int:
        """Tokens that a row computes of its `num_pending`, after the `num_computed` it has; 0 if it must wait."""
        granted = min(num_pending, self.num_left)
        self.num_left -= granted
        return granted


class TimedAllowance(Allowance):
    """An allowance that also ends where the step would take longer than `limit_s`."""

    __slots__ = ("_decode_context", "_limit_s", "_model", "_num_tokens", "_num_unconditional", "_pairs")

    def __init__(
        self, num_tokens: int, num_decodes: int, decode_context: int, limit_s: float, model: StepCostModel
    ) -> None:
        super().__init__(num_tokens, num_decodes)
        self._model = model
        self._limit_s = limit_s
        self._decode_context = decode_context
        self._num_tokens = self.num_decodes
        self._pairs = 0.0
        self._num_unconditional = MIN_PREFILL_TOKENS

    def grant(self, num_pending: int, num_computed: int) -> int:
        wanted = min(num_pending, self.num_left)
        granted = min(wanted, self._num_unconditional)
        if granted < wanted and self._fits(wanted, num_computed):
            granted = wanted
        too_many = wanted if granted < wanted else granted
        while too_many - granted > 1:
            middle = (granted + too_many) // 2
            if self._fits(middle, num_computed):
                granted = middle
            else:
                too_many = middle
        self._num_tokens += granted
        self._pairs += context_pairs(granted, num_computed)
        self._num_unconditional = max(0, self._num_unconditional - granted)
        self.num_left = self.num_left - granted if granted == wanted else 0
        return granted

    def _fits(self, num_tokens: int, num_computed: int) -> bool:
        pairs = self._pairs + context_pairs(num_tokens, num_computed)
        return self._model.seconds(self._num_tokens + num_tokens, self._decode_context, pairs) <= self._limit_s


class BudgetPolicy(Protocol):
    """Hands out the allowance of each step. Only `observe` changes anything."""

    @property
    def mixed_tokens(self) -> int:
        """What the last step, or the next one like it, may compute at most if requests decode in it."""

    def for_step(self, num_decodes: int, decode_context: int) -> Allowance:
        """The allowance of a step with `num_decodes` rows of one token, which read `decode_context` tokens."""

    def observe(self, plan: StepPlan, elapsed_s: float) -> None:
        """A step is done; it took the device `elapsed_s` (0: nobody looked)."""

    def describe(self) -> str:
        """The policy in force, with its numbers, for the log."""


class FixedBudget:
    """The same for every step."""

    def __init__(self, num_tokens: int) -> None:
        self.mixed_tokens = num_tokens

    def for_step(self, num_decodes: int, decode_context: int) -> Allowance:
        return Allowance(self.mixed_tokens, num_decodes)

    def observe(self, plan: StepPlan, elapsed_s: float) -> None:
        """Nothing is to be learnt."""

    def describe(self) -> str:
        return f"{self.mixed_tokens} tokens in every step"


class EfficientBudget:
    """In steps with decodes the smallest number of tokens at which a token costs at most 5 % more than at the best.

    Candidates are the sizes at which the cost model has a knot, as far as they are known. Doubt speaks for the smaller
    one: in use it is measured anew. Other sizes that may be right are visited in single steps now and then, so that a
    measurement that erred is corrected in either direction: after some steps the choice rests on steps alone, except
    that it stays within twice the size that the start chose. If nothing was measured at the start, each size that may
    be the best is tried at once.
    """

    def __init__(self, max_tokens: int, model: StepCostModel) -> None:
        self._max_tokens = max_tokens
        self._model = model
        self._untried: list[int] = []
        self._chosen = max_tokens
        self._visits = _Visits()
        self._largest = max_tokens
        self._reconsider()
        if model.was_measured:
            self._largest = 2 * self._chosen

    @property
    def mixed_tokens(self) -> int:
        return self._chosen

    def for_step(self, num_decodes: int, decode_context: int) -> Allowance:
        if num_decodes == 0:
            return Allowance(self._max_tokens, 0)
        least = num_decodes + MIN_PREFILL_TOKENS
        wanted = next((size for size in self._untried if size >= least), max(self._chosen, least))
        if self._visits.next_size >= least:
            wanted = self._visits.next_size
        return Allowance(min(wanted, self._max_tokens), num_decodes)

    def observe(self, plan: StepPlan, elapsed_s: float) -> None:
        work = work_of(plan)
        self._model.observe(work, elapsed_s)
        if plan.num_decodes < plan.num_reqs and elapsed_s > 0.0:
            sizes = self._reconsider()
            if plan.num_decodes > 0:
                self._visits.count(work.num_tokens, sizes)
                self._visits.choose_next(plan.num_decodes + MIN_PREFILL_TOKENS, sizes, self._chosen)

    def describe(self) -> str:
        costs = ", ".join(f"{size.num_tokens}: {size.seconds * 1e3:.1f}" for size in self._sizes() if size.is_known)
        if not costs:
            return f"{self._max_tokens} tokens in a step; beside running streams fewer, to be learnt from the steps"
        return f"{self._max_tokens} tokens in a step, {self._chosen} beside running streams (ms by tokens: {costs})"

    def _sizes(self) -> list[SizeCost]:
        """Sizes that have room for prompts beside a decode."""
        return [size for size in self._model.size_costs() if size.num_tokens > MIN_PREFILL_TOKENS]

    def _reconsider(self) -> list[SizeCost]:
        """Choose anew. Returns what is known of the sizes, ascending."""
        sizes = self._sizes()
        known = [size for size in sizes if size.is_known and size.num_tokens <= self._largest]
        if not known:
            return []
        best = min(size.per_token for size in known)
        if not self._model.was_measured:
            self._untried = [s.num_tokens for s in sizes if not s.is_known and s.least_per_token(1.0) < best]
        bound = (1.0 + _MOST_LOSS) * best
        for size in known:
            benefit = _BENEFIT_IN_USE if size.num_tokens == self._chosen else _BENEFIT
            if size.least_per_token(benefit) <= bound:
                self._chosen = size.num_tokens
                break
        return known


class _Visits:
    """When mixed steps of another than the chosen size are worth it, to see what it costs now."""

    def __init__(self) -> None:
        self.next_size = 0
        """Of the next mixed step; 0: the chosen one."""
        self._num_steps = 0
        self._num_tokens = 0
        """Of mixed steps since the last visit of a smaller size began."""
        self._counts: dict[int, int] = {}
        """Visits by size, up to `_NUM_VISITS`."""
        self._last: dict[int, int] = {}
        """By size, the mixed step that visited it last."""
        self._larger_due_at = _FIRST_LARGE_VISIT

    def count(self, num_tokens: int, sizes: list[SizeCost]) -> None:
        """A mixed step of `num_tokens` was observed: a visit of the size that it nearly filled, if there is one."""
        self._num_steps += 1
        self._num_tokens += num_tokens
        for size in sizes:
            if 0.9 * size.num_tokens < num_tokens <= size.num_tokens:
                self._counts[size.num_tokens] = min(self._num_visits(size.num_tokens) + 1, _NUM_VISITS)
                self._last[size.num_tokens] = self._num_steps

    def choose_next(self, least: int, sizes: list[SizeCost], chosen: int) -> None:
        """Decide whether the next mixed step, of at least `least` tokens, visits another of `sizes` than `chosen`, and
        say so in `next_size`."""
        best = min((size.per_token for size in sizes), default=0.0)
        bound = (1.0 + _MOST_LOSS) * best
        smaller = [s for s in sizes if least <= s.num_tokens < chosen and self._is_due(s, best)]
        worthwhile = [s.num_tokens for s in smaller if self._may_cost(s, bound)]
        self.next_size = min(worthwhile, key=lambda size: (self._last.get(size, 0), -size), default=0)
        if self.next_size:
            self._num_tokens = 0
        elif self._num_steps >= self._larger_due_at:
            used = next((size.per_token for size in sizes if size.num_tokens == chosen), 0.0)
            larger = next((s for s in sizes if max(chosen, least - 1) < s.num_tokens <= 2 * chosen), None)
            if larger is not None and self._may_cost(larger, used / (1.0 + _MOST_LOSS)):
                self.next_size = larger.num_tokens
                self._larger_due_at = self._num_steps + _LARGE_VISIT_INTERVAL

    def _is_due(self, size: SizeCost, best: float) -> bool:
        """Whether a visit of a smaller size now would leave the cost of visits within its limits, if a token costs
        `best` seconds at the best size."""
        most_loss = _FIRST_VISITS_LOSS if self._num_visits(size.num_tokens) < _NUM_VISITS else _VISITS_LOSS
        loss = size.num_tokens * (size.per_token - best)
        return size.num_tokens <= _MOST_VISITS * self._num_tokens and loss <= most_loss * best * self._num_tokens

    def _may_cost(self, size: SizeCost, bound: float) -> bool:
        """Whether it is worth a visit to see if a token costs at most `bound` seconds at this size."""
        if self._num_visits(size.num_tokens) < _NUM_VISITS and size.per_token <= bound * (1.0 + _START_ERROR):
            return True
        return size.least_per_token(_HOPE) <= bound

    def _num_visits(self, size: int) -> int:
        num_visits = self._counts.get(size, 0)
        is_stale = num_visits > 0 and self._num_steps - self._last[size] > _STALE_STEPS
        return num_visits - is_stale


class TargetBudget:
    """In steps with decodes as many tokens as keep the step's predicted time, with room for error, within a target."""

    def __init__(
        self, max_tokens: int, target_s: float, model: StepCostModel, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_tokens = max_tokens
        self._target_s = target_s
        self._model = model
        self._clock = clock
        self._warned_at = -_WARNING_INTERVAL_S
        self.mixed_tokens = max_tokens

    def for_step(self, num_decodes: int, decode_context: int) -> Allowance:
        if num_decodes == 0:
            return Allowance(self._max_tokens, 0)
        if not self._model.has_learnt:
            return Allowance(min(self._max_tokens, num_decodes + MIN_PREFILL_TOKENS), num_decodes)
        return TimedAllowance(self._max_tokens, num_decodes, decode_context, self._limit_s, self._model)

    def observe(self, plan: StepPlan, elapsed_s: float) -> None:
        work = work_of(plan)
        self._model.observe(work, elapsed_s)
        if plan.num_decodes == 0 or elapsed_s <= 0.0 or not self._model.has_learnt:
            return
        if plan.num_decodes < plan.num_reqs:
            likewise = self.for_step(plan.num_decodes, work.decode_context)
            self.mixed_tokens = likewise.num_decodes + likewise.grant(self._max_tokens, 0)
        if work.num_tokens - plan.num_decodes <= MIN_PREFILL_TOKENS:
            predicted_s = self._model.predict(work)
            if predicted_s > self._target_s:
                self._warn(plan.num_decodes, predicted_s)

    def describe(self) -> str:
        return (
            f"at most {self._max_tokens} tokens in a step; beside running streams as many as keep the step within "
            f"{self._target_s * 1e3:g} ms, at least {MIN_PREFILL_TOKENS} prompt tokens"
        )

    @property
    def _limit_s(self) -> float:
        return self._target_s / (1.0 + _SAFETY * self._model.noise)

    def _warn(self, num_decodes: int, predicted_s: float) -> None:
        now = self._clock()
        if now < self._warned_at + _WARNING_INTERVAL_S:
            return
        self._warned_at = now
        logger.warning(
            "--target-itl-ms %g cannot be kept at this load: a step of %d running requests takes %.1f ms even with "
            "next to no prompt tokens. Prompts still get %d tokens of each step. Raise the target or lower "
            "--max-num-seqs (this is said once a minute at most)",
            self._target_s * 1e3,
            num_decodes,
            predicted_s * 1e3,
            MIN_PREFILL_TOKENS,
        )


def make_budget(config: SchedulerConfig, prefill_costs: PrefillCosts = ()) -> BudgetPolicy:
    """The policy that the flags ask for. `prefill_costs` were measured by the worker at its start, if at all."""
    max_tokens = config.max_num_batched_tokens
    if config.target_itl_ms is not None:
        return TargetBudget(max_tokens, config.target_itl_ms * 1e-3, StepCostModel(max_tokens, prefill_costs))
    if config.explicit_budget:
        return FixedBudget(max_tokens)
    return EfficientBudget(max_tokens, StepCostModel(max_tokens, prefill_costs))
