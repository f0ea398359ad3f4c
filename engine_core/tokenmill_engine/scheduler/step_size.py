"""How many tokens a step computes beside running streams, if nobody says: as few as serve well.

Twice the tokens make running streams wait longer for each token of theirs, and most devices compute more tokens at
lower cost each. So a size is doubled as long as that pays: it has to make a token 1 % cheaper, attention left out, and
where it adds more than 5 ms to a step, 0.7 % for each millisecond beyond these, up to 10 %. Where steps are short that
gives the best throughput within a few percent; where they are long, even streams count for more.

What sizes cost can only be told by comparing like with like, since what steps hold otherwise differs far more: decodes
and their contexts, how long prompts are, how hot the card is, whether the host was late. There are two sources:

* What the worker measured at its start, one size after the other with the same prompts. It decides, and with it goes
  how far evidence may move the choice later: one doubling in either direction.
* Comparisons under load: a single step of the next smaller or larger size after one of the size in use, both full. What
  the two have in common cancels out. The choice moves only if the median of several comparisons contradicts it by two
  standard errors.

Without measurements of the start (on the CPU) a usual size is in charge until comparisons say more.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

from tokenmill_engine.scheduler.cost_model import PrefillCosts, StepCostModel, StepWork, plausible_costs

logger = logging.getLogger(__name__)

_LEAST_GAIN, _MOST_GAIN = 0.01, 0.10
"""Bounds of what twice the tokens have to save of a token's cost."""
_UNNOTICED_S, _GAIN_PER_S = 0.005, 7.0
"""Seconds that they may add to a step for the least gain, and the gain that is asked for each second beyond. At its
starts an H100 with an 8B model saved 9 to 13 % from 512 to 1024 tokens, which add 9 ms, and up to 6 % from 1024 to
2048, which add 19; its products alone save 4 and 1 % when it is hot. Which of the two pays must not depend on the day.
"""
_SMALLEST = 64
_USUAL = 256
"""Where nothing was measured."""
_FULL = 0.95
"""A step with a smaller share of its size is not compared: its size is not what limited it."""

_FEWEST_COMPARISONS, _MOST_COMPARISONS = 4, 32
"""That make a verdict; that are remembered of two sizes."""
_STANDARD_ERRORS = 2.0
_LEAST_SPREAD = 0.03
"""Relative standard deviation of a comparison, even if those so far agree better."""
_MOST_ATTENTION = 0.8
"""Share of a step that attention may seem to take; where it takes more, sizes hardly matter."""

_SMALLER_INTERVAL, _LARGER_INTERVAL = 8, 250
"""Full mixed steps from one visit of a smaller size to the next; and of a larger one, which running streams notice: it
has to be far fewer than 1 of 100 steps."""
_FIRST_SMALLER_INTERVAL, _FIRST_LARGER_INTERVAL = 4, 16
"""The same where nothing was measured at the start."""
_SETTLED_INTERVAL = 500
"""The same once comparisons have given a clear verdict."""
_LOG_INTERVAL_S = 10.0


@dataclass(slots=True, frozen=True)
class _FullStep:
    size: int
    work: StepWork
    elapsed_s: float

    def per_token(self, model: StepCostModel) -> float:
        """Seconds that a token took, attention left out."""
        attention = min(model.attention_seconds(self.work), _MOST_ATTENTION * self.elapsed_s)
        return (self.elapsed_s - attention) / self.work.num_tokens


@dataclass(slots=True, frozen=True)
class _Verdict:
    """Whether twice a size pays."""

    gain: float
    """What it saves of a token's cost, relative."""
    least_gain: float
    """What it has to save."""
    error: float
    """Standard error of `gain`."""
    num_comparisons: int

    @property
    def pays(self) -> bool:
        return self.gain >= self.least_gain

    @property
    def is_clear(self) -> bool:
        """Whether there is little doubt."""
        return abs(self.gain - self.least_gain) > _STANDARD_ERRORS * self.error

    def __str__(self) -> str:
        return (
            f"saves {self.gain:.1%} a token ({self.num_comparisons} comparisons, +- {self.error:.1%}), has to save "
            f"{self.least_gain:.1%}"
        )


class _Comparisons:
    """Of steps of one size with steps of twice that size."""

    def __init__(self) -> None:
        self.verdict: _Verdict | None = None
        """None: there are too few."""
        self._ratios: deque[float] = deque(maxlen=_MOST_COMPARISONS)
        """What a token cost at twice the size, in proportion."""
        self._added_s: deque[float] = deque(maxlen=_MOST_COMPARISONS)
        """By how much the step took longer."""

    def add(self, ratio: float, added_s: float) -> None:
        self._ratios.append(ratio)
        self._added_s.append(added_s)
        count = len(self._ratios)
        if count < _FEWEST_COMPARISONS:
            return
        middle = median(self._ratios)
        # 1.48 median absolute deviations are a standard deviation; a median errs by 1.25 times what a mean does.
        spread = max(1.48 * median(abs(ratio - middle) for ratio in self._ratios), _LEAST_SPREAD)
        error = 1.25 * spread / math.sqrt(count)
        self.verdict = _Verdict(1.0 - middle, _least_gain(median(self._added_s)), error, count)


class StepSize:
    """The size in use, and what contradicts it. Sizes are 64, 128, 256, ... up to `max_tokens`, or that if it is less.

    Everything but the level of log lines is deterministic in the order of what was observed.
    """

    def __init__(
        self, max_tokens: int, prefill_costs: PrefillCosts, clock: Callable[[], float] = time.monotonic
    ) -> None:
        sizes = [_SMALLEST << power for power in range(max_tokens.bit_length()) if _SMALLEST << power <= max_tokens]
        self._sizes = sizes or [max_tokens]
        measured = plausible_costs(max_tokens, prefill_costs)
        self._measured = {size: measured[size] for size in self._sizes if size in measured}
        """Seconds of a step at the start."""
        self._comparisons = {size: _Comparisons() for size in self._sizes}
        """By the smaller size."""
        self._last: _FullStep | None = None
        """The step before, if it was a full mixed one."""
        self._num_steps: dict[int, int] = {}
        """By size, full mixed steps since the last visit of it was planned."""
        self._clock = clock
        self._logged_at = -math.inf
        self.in_use = self._at_start()
        self.next_size = self.in_use
        """Of the next mixed step; another one than `in_use` is a visit."""
        if self._measured:
            self._sizes = [size for size in self._sizes if self.in_use // 2 <= size <= 2 * self.in_use]

    def observe(self, work: StepWork, elapsed_s: float, least: int, model: StepCostModel) -> None:
        """A mixed step took `elapsed_s`, and the next one like it could not have fewer tokens than `least`.

        Sets `next_size`, and sometimes `in_use`. `model` says how much of a step is attention.
        """
        size = next((size for size in self._sizes if _FULL * size < work.num_tokens <= size), 0)
        if size == 0 or not 0.0 < elapsed_s < math.inf:
            self.interrupt()
            return
        before, self._last = self._last, _FullStep(size, work, elapsed_s)
        if before is not None and before.size == self.in_use != size:
            self._compare(before, self._last, model)
        self._plan_visit(least)

    def interrupt(self) -> None:
        """A step ran that is compared with nothing."""
        self._last = None
        self.next_size = self.in_use

    def _at_start(self) -> int:
        measured = self._measured
        if not measured:
            return max((size for size in self._sizes if size <= _USUAL), default=self._sizes[0])
        size = min(measured)
        while 2 * size in measured:
            one, two = measured[size], measured[2 * size]
            if 1.0 - two / (2.0 * one) < _least_gain(two - one):
                break
            size *= 2
        return size

    def _compare(self, usual: _FullStep, visit: _FullStep, model: StepCostModel) -> None:
        """Learn from a visit right after a step of the size in use."""
        smaller, larger = (usual, visit) if usual.size < visit.size else (visit, usual)
        comparisons = self._comparisons.get(smaller.size)
        if comparisons is None or larger.size != 2 * smaller.size:
            return
        comparisons.add(larger.per_token(model) / smaller.per_token(model), larger.elapsed_s - smaller.elapsed_s)
        logger.debug(
            "a step of %d tokens took %.2f ms, the one of %d before it %.2f, context %d; %d instead of %d %s",
            visit.work.num_tokens,
            visit.elapsed_s * 1e3,
            usual.work.num_tokens,
            usual.elapsed_s * 1e3,
            visit.work.decode_context,
            larger.size,
            smaller.size,
            comparisons.verdict or "is not known well enough yet",
        )
        self._decide(smaller.size)

    def _decide(self, smaller: int) -> None:
        """Move to the other one of two sizes, one of them in use, if comparisons say so clearly."""
        verdict = self._comparisons[smaller].verdict
        if verdict is None or not verdict.is_clear:
            return
        better = 2 * smaller if verdict.pays else smaller
        if better != self.in_use:
            self._log_change(better, smaller, verdict)
            self.in_use = better
            self._num_steps.clear()
            self.interrupt()

    def _plan_visit(self, least: int) -> None:
        """Set `next_size`: another one than that in use if its turn has come."""
        self.next_size = self.in_use
        if self.in_use < least or self._last is None or self._last.size != self.in_use:
            return
        for size in (self.in_use // 2, 2 * self.in_use):
            if size in self._sizes and size >= least:
                self._num_steps[size] = self._num_steps.get(size, 0) + 1
                if self.next_size == self.in_use and self._num_steps[size] >= self._interval(size):
                    self.next_size = size
                    self._num_steps[size] = 0

    def _interval(self, size: int) -> int:
        verdict = self._comparisons[min(size, self.in_use)].verdict
        if verdict is not None and verdict.is_clear:
            return _SETTLED_INTERVAL
        if self._measured:
            return _SMALLER_INTERVAL if size < self.in_use else _LARGER_INTERVAL
        return _FIRST_SMALLER_INTERVAL if size < self.in_use else _FIRST_LARGER_INTERVAL

    def _log_change(self, better: int, smaller: int, verdict: _Verdict) -> None:
        now = self._clock()
        is_rare = now >= self._logged_at + _LOG_INTERVAL_S
        if is_rare:
            self._logged_at = now
        logger.log(
            logging.INFO if is_rare else logging.DEBUG,
            "token budget beside running streams: %d -> %d: a step of %d tokens instead of %d %s; ms by tokens at the "
            "start: %s",
            self.in_use,
            better,
            2 * smaller,
            smaller,
            verdict,
            describe_costs(self._measured.items()) or "not measured",
        )


def describe_costs(prefill_costs: Iterable[tuple[int, float]]) -> str:
    """For the log."""
    return ", ".join(f"{size}: {seconds * 1e3:.1f}" for size, seconds in prefill_costs)


def _least_gain(added_s: float) -> float:
    """What twice the tokens have to save of a token's cost if the step takes `added_s` longer."""
    return min(max(_GAIN_PER_S * (added_s - _UNNOTICED_S), _LEAST_GAIN), _MOST_GAIN)
