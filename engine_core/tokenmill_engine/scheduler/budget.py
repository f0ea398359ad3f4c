"""How many tokens a step may compute. A policy decides; which one follows from the flags:

* `--max-num-batched-tokens` alone, and `LLM` on a GPU: every step may compute that many.
* `--target-itl-ms`: a step in which requests decode takes as many prompt tokens as keep its predicted time within the
  target; at least `MIN_PREFILL_TOKENS`, so that prompts never starve.
* neither: a step in which requests decode takes the number of tokens that `step_size` finds: as few as serve well.

A step in which nothing decodes may always compute `max_num_batched_tokens`: nobody waits for its end. No policy
changes what is computed, only when.
"""

import logging
import time
from collections.abc import Callable
from typing import Protocol

from tokenmill_engine.config.engine import SchedulerConfig
from tokenmill_engine.outputs import StepPlan
from tokenmill_engine.scheduler.cost_model import PrefillCosts, StepCostModel, context_pairs, work_of
from tokenmill_engine.scheduler.step_size import StepSize, describe_costs

logger = logging.getLogger(__name__)

MIN_PREFILL_TOKENS = 32
"""Prompt tokens that a step may compute whatever decodes beside them, within `max_num_batched_tokens`."""

_SAFETY = 2.5
"""Standard deviations that a step may take longer than predicted and still keep the target."""
_WARNING_INTERVAL_S = 60.0


class Allowance:
    """What one step may still compute, beside `num_decodes` rows of one token that it has granted already."""

    __slots__ = ("num_decodes", "num_granted", "num_left")

    def __init__(self, num_tokens: int, num_decodes: int) -> None:
        self.num_decodes = min(num_decodes, num_tokens)
        self.num_granted = self.num_decodes
        self.num_left = num_tokens - self.num_decodes

    def grant(self, num_pending: int, num_computed: int) -> int:
        """Tokens that a row computes of its `num_pending`, after the `num_computed` it has; 0 if it must wait."""
        granted = min(num_pending, self.num_left)
        self.num_granted += granted
        self.num_left -= granted
        return granted

    def has_time(self, seconds: float) -> bool:
        """Whether the step may do something else for so long, beside its tokens."""
        return True

    def spend(self, seconds: float) -> None:
        """The step does something else for so long."""

    def exceed(self, num_tokens: int, max_tokens: int) -> int:
        """Grants `num_tokens`, more than there are, to a row that cannot do with less, if only rows of one token come
        before it and the step then has at most `max_tokens`; else nothing. Either way the step is full: nobody
        overtakes a row that waits for room."""
        self.num_left = 0
        if self.num_granted > self.num_decodes or self.num_granted + num_tokens > max_tokens:
            return 0
        self.num_granted += num_tokens
        return num_tokens


class TimedAllowance(Allowance):
    """An allowance that also ends where the step would take longer than `limit_s`."""

    __slots__ = ("_decode_context", "_limit_s", "_model", "_num_unconditional", "_pairs")

    def __init__(
        self, num_tokens: int, num_decodes: int, decode_context: int, limit_s: float, model: StepCostModel
    ) -> None:
        super().__init__(num_tokens, num_decodes)
        self._model = model
        self._limit_s = limit_s
        self._decode_context = decode_context
        self._pairs = 0.0
        self._num_unconditional = MIN_PREFILL_TOKENS

    def has_time(self, seconds: float) -> bool:
        return self._model.seconds(self.num_granted, self._decode_context, self._pairs) + seconds <= self._limit_s

    def spend(self, seconds: float) -> None:
        self._limit_s -= seconds

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
        self.num_granted += granted
        self._pairs += context_pairs(granted, num_computed)
        self._num_unconditional = max(0, self._num_unconditional - granted)
        self.num_left = self.num_left - granted if granted == wanted else 0
        return granted

    def _fits(self, num_tokens: int, num_computed: int) -> bool:
        pairs = self._pairs + context_pairs(num_tokens, num_computed)
        return self._model.seconds(self.num_granted + num_tokens, self._decode_context, pairs) <= self._limit_s


class BudgetPolicy(Protocol):
    """Hands out the allowance of each step. Only `observe` changes anything."""

    @property
    def mixed_tokens(self) -> int:
        """What the last step, or the next one like it, may compute at most if requests decode in it."""

    def for_step(self, num_decodes: int, decode_context: int, num_elsewhere: int = 0) -> Allowance:
        """The allowance of a step with `num_decodes` rows of one token, which read `decode_context` tokens.
        `num_elsewhere` requests have their tokens in other steps, whose successors wait for this one."""

    def observe(self, plan: StepPlan, elapsed_s: float) -> None:
        """A step is done; it took the device `elapsed_s` (0: nobody looked)."""

    def describe(self) -> str:
        """The policy in force, with its numbers, for the log."""


class FixedBudget:
    """The same for every step."""

    def __init__(self, num_tokens: int) -> None:
        self.mixed_tokens = num_tokens

    def for_step(self, num_decodes: int, decode_context: int, num_elsewhere: int = 0) -> Allowance:
        return Allowance(self.mixed_tokens, num_decodes)

    def observe(self, plan: StepPlan, elapsed_s: float) -> None:
        """Nothing is to be learnt."""

    def describe(self) -> str:
        return f"{self.mixed_tokens} tokens in every step"


class DefaultBudget:
    """In steps with decodes as many tokens as `StepSize` says."""

    def __init__(self, max_tokens: int, prefill_costs: PrefillCosts) -> None:
        self._max_tokens = max_tokens
        self._model = StepCostModel(max_tokens, prefill_costs)
        self._size = StepSize(max_tokens, prefill_costs)
        self._prefill_costs = prefill_costs

    @property
    def mixed_tokens(self) -> int:
        return self._size.in_use

    def for_step(self, num_decodes: int, decode_context: int, num_elsewhere: int = 0) -> Allowance:
        if num_decodes + num_elsewhere == 0:
            return Allowance(self._max_tokens, 0)
        num_tokens = max(self._size.next_size, num_decodes + MIN_PREFILL_TOKENS)
        return Allowance(min(num_tokens, self._max_tokens), num_decodes)

    def observe(self, plan: StepPlan, elapsed_s: float) -> None:
        work = work_of(plan)
        self._model.observe(work, elapsed_s)
        if 0 < plan.num_decodes < plan.num_reqs:
            self._size.observe(work, elapsed_s, plan.num_decodes + MIN_PREFILL_TOKENS, self._model)
        else:
            self._size.interrupt()

    def describe(self) -> str:
        costs = describe_costs(self._prefill_costs)
        reason = f"ms by tokens: {costs}" if costs else "to be compared with other sizes"
        return f"{self._max_tokens} tokens in a step, {self.mixed_tokens} beside running streams ({reason})"


class TargetBudget:
    """In steps with decodes as many tokens as keep the step's predicted time, with room for error, within a target."""

    def __init__(
        self,
        max_tokens: int,
        target_s: float,
        model: StepCostModel,
        clock: Callable[[], float] = time.monotonic,
        steps_per_token: int = 1,
    ) -> None:
        """A request that runs waits for `steps_per_token` steps from token to token."""
        self._max_tokens = max_tokens
        self._target_s = target_s
        self._steps_per_token = steps_per_token
        self._model = model
        self._clock = clock
        self._warned_at = -_WARNING_INTERVAL_S
        self.mixed_tokens = max_tokens

    def for_step(self, num_decodes: int, decode_context: int, num_elsewhere: int = 0) -> Allowance:
        if num_decodes + num_elsewhere == 0:
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
            predicted_s = self._model.predict(work) * self._steps_per_token
            if predicted_s > self._target_s:
                self._warn(plan.num_decodes, predicted_s)

    def describe(self) -> str:
        return (
            f"at most {self._max_tokens} tokens in a step; beside running streams as many as keep the step within "
            f"{self._target_s / self._steps_per_token * 1e3:g} ms, at least {MIN_PREFILL_TOKENS} prompt tokens"
        )

    @property
    def _limit_s(self) -> float:
        return self._target_s / self._steps_per_token / (1.0 + _SAFETY * self._model.noise)

    def _warn(self, num_decodes: int, predicted_s: float) -> None:
        now = self._clock()
        if now < self._warned_at + _WARNING_INTERVAL_S:
            return
        self._warned_at = now
        logger.warning(
            "--target-itl-ms %g cannot be kept at this load: %d running requests wait %.1f ms for a token even with "
            "next to no prompt tokens. Prompts still get %d tokens of each step. Raise the target or lower "
            "--max-num-seqs (this is said once a minute at most)",
            self._target_s * 1e3,
            num_decodes,
            predicted_s * 1e3,
            MIN_PREFILL_TOKENS,
        )


def make_budget(config: SchedulerConfig, prefill_costs: PrefillCosts = (), steps_per_token: int = 1) -> BudgetPolicy:
    """The policy that the flags ask for. `prefill_costs` were measured by the worker at its start, if at all;
    `steps_per_token` as in `TargetBudget`."""
    max_tokens = config.max_num_batched_tokens
    if config.target_itl_ms is not None:
        model, target_s = StepCostModel(max_tokens, prefill_costs), config.target_itl_ms * 1e-3
        return TargetBudget(max_tokens, target_s, model, steps_per_token=steps_per_token)
    if config.explicit_budget:
        return FixedBudget(max_tokens)
    return DefaultBudget(max_tokens, prefill_costs)
