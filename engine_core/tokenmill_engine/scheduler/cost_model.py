"""How long a step will take on this device: learnt from the steps before it, for the budget of the next one.

The time of a step is taken as

    base(num_tokens) + a * decode_context + b * prefill_context,    a, b >= 0

`base` is what all tokens cost alike (matrix products, norms, launches): a line through knots at powers of two, since
products run at different speeds for different numbers of rows. The other two terms are attention. Knots and slopes
together are the state of a Kalman filter. Against simulated devices it predicts better than averages per size with
slopes fitted beside them, since the prior says that costs of neighbouring sizes, and of all sizes, err in the same
direction: what one size teaches (a hot card is slower at everything) corrects the sizes that did not occur. Which of
two sizes is cheaper by a few percent is not for it to say: loads in which contexts grow with the tokens of a step do
not tell one cost from another (`step_size` compares like with like).

A step that waited for something tells nothing: one that took far too long changes next to nothing, unless those of
its size do so several times in a row. Then, and when a step was too quick, the model is wrong, and the filter admits
it. A prediction is advice and must not stop an engine: times that no step takes are not looked at, and a filter whose
numbers are not finite begins anew. Everything is deterministic in the order of observations. Times are seconds.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.outputs import StepPlan

PrefillCosts = Sequence[tuple[int, float]]
"""(tokens, seconds) of steps that only compute prompts."""

_FIRST_KNOTS = (1, 4, 16, 32)
_NUM_SLOPES = 2

_DECODE_PER_TOKEN = 1 / 400
"""First guess: reading one token of context costs a decode row this share of computing a token."""
_PREFILL_PER_TOKEN = 1e-4
"""The same for one token of context of one prompt token."""
_FIXED_TOKENS = 16
"""First guess where nothing was measured: a step costs as much as this many tokens before it computes any."""

_MEASURED_SPREAD = 0.04
_UNMEASURED_SPREAD = 0.4
"""Relative error of a knot by itself, measured at the start or not; and of all knots together:"""
_SHARED_SPREAD = 0.05
_KNOT_DISTANCE = 2.0
"""Octaves over which knots cease to err alike."""
_DRIFT = 0.003
"""Relative change of a cost from one step to the next."""
_MOST_DRIFT_ERROR = 0.04
"""Costs do not drift into more doubt than that: for hours, steps may not tell one cost from another."""

_LEAST_S, _MOST_S = 1e-9, 1e6
"""Times beyond these are no times of steps."""
_OUTLIER = 4.0
"""Standard deviations."""
_OUTLIERS_OF_CHANGE = 5
"""So many slow steps in a row, of about one size, are a device that has changed."""
_FIRST_NOISE, _LEAST_NOISE, _MOST_NOISE = 0.03, 0.005, 0.2
_NOISE_MEMORY = 0.02


@dataclass(slots=True, frozen=True)
class StepWork:
    """What the time of a step depends on, as far as the host knows."""

    num_tokens: int
    decode_context: int = 0
    """Tokens of context that the decode rows read, all together."""
    prefill_context: float = 0.0
    """Token pairs of the other rows: each computed token with each token of context that it reads."""


def context_pairs(num_tokens: float, num_computed: float) -> float:
    """`StepWork.prefill_context` of a chunk of `num_tokens` after `num_computed` tokens."""
    return num_tokens * (num_computed + 0.5 * num_tokens)


def work_of(plan: StepPlan) -> StepWork:
    """The work of a planned step."""
    num_decodes = plan.num_decodes
    decode_context = int(plan.num_computed[:num_decodes].sum()) + num_decodes
    if num_decodes == plan.num_reqs:
        return StepWork(num_decodes, decode_context)
    chunks = plan.num_scheduled[num_decodes:].astype(np.float64)
    pairs = chunks @ (plan.num_computed[num_decodes:] + 0.5 * chunks)
    return StepWork(num_decodes + int(chunks.sum()), decode_context, float(pairs))


class StepCostModel:
    """Predicts steps of up to `max_tokens` tokens. `prefill_costs` were measured at the start, or are empty."""

    def __init__(self, max_tokens: int, prefill_costs: PrefillCosts = ()) -> None:
        measured = plausible_costs(max_tokens, prefill_costs)
        self._knots = _knots(max_tokens, measured)
        self._measured = np.array([knot in measured for knot in self._knots])
        self._costs = np.zeros(len(self._knots) + _NUM_SLOPES)
        """Seconds of each knot, then per token of decode context and per pair of prefill context."""
        self._covariance = np.zeros((len(self._costs), len(self._costs)))
        self._variances = np.einsum("ii->i", self._covariance)
        """A view of the diagonal."""
        self._base: list[float] = []
        """Seconds at the knots, never falling: a larger step is never predicted to be quicker."""
        self._slopes = 0.0, 0.0
        self._noise = _FIRST_NOISE
        self._slow_steps: list[int] = []
        """Below each knot, steps in a row that took surprisingly long."""
        self._at_start = _between(measured, np.array(self._knots)) if measured else None
        self._begin()

    @property
    def has_learnt(self) -> bool:
        """Whether there is anything to predict from."""
        return bool(self._base)

    @property
    def noise(self) -> float:
        """Standard deviation of a step's time from what was predicted, relative."""
        return self._noise

    def predict(self, work: StepWork) -> float:
        """Seconds that the step will take. Call only once something was learnt."""
        return self.seconds(work.num_tokens, work.decode_context, work.prefill_context)

    def seconds(self, num_tokens: int, decode_context: float, prefill_context: float) -> float:
        """`predict` without the dataclass, for searches."""
        upper, share = self._place(num_tokens)
        base = self._base
        decode, prefill = self._slopes
        between = base[upper - 1] + share * (base[upper] - base[upper - 1])
        return between + decode * decode_context + prefill * prefill_context

    def attention_seconds(self, work: StepWork) -> float:
        """What part of a step's time is attention, as far as is known."""
        decode, prefill = self._slopes
        return decode * work.decode_context + prefill * work.prefill_context

    def observe(self, work: StepWork, elapsed_s: float) -> None:
        """Learn from a step that took `elapsed_s`; nothing is learnt from 0, which means that nobody looked."""
        if not _LEAST_S <= elapsed_s <= _MOST_S or work.num_tokens < 1:
            return
        with np.errstate(all="ignore"):
            self._learn(work, elapsed_s)
            is_sane = np.isfinite(self._costs).all() and np.isfinite(self._covariance).all()
        if is_sane:
            self._publish()
        else:
            self._begin()

    def _learn(self, work: StepWork, elapsed_s: float) -> None:
        """`observe`, up to the look-up."""
        if not self._base:
            per_token = elapsed_s / (work.num_tokens + _FIXED_TOKENS)
            self._believe((np.array(self._knots) + _FIXED_TOKENS) * per_token, 1.0)
        upper, share = self._place(work.num_tokens)
        features = np.zeros(len(self._costs))
        features[upper - 1] = 1.0 - share
        features[upper] = share
        features[-2] = work.decode_context
        features[-1] = work.prefill_context
        costs, covariance = self._costs, self._covariance
        predicted = max(float(costs @ features), _LEAST_S)
        error = elapsed_s - predicted
        is_active = features > 0.0
        scale = self._scale()
        drift = _DRIFT * scale * (self._variances < (_MOST_DRIFT_ERROR * scale) ** 2)
        self._doubt(drift * is_active, drift)
        shared = covariance @ features
        variance = self._variance(shared, features, predicted)
        deviations = error / math.sqrt(variance)
        if self._is_mistaken(upper, deviations):
            # About these costs, or about all of them.
            doubt = error / predicted * scale
            self._doubt(doubt * is_active, 0.7 * doubt)
            shared = covariance @ features
            variance = self._variance(shared, features, predicted)
        elif deviations > _OUTLIER:
            # As if it had been measured so badly that it is no surprise.
            variance *= deviations / _OUTLIER * deviations / _OUTLIER
        else:
            # 1.25 mean absolute deviations are a standard deviation, and heed rare large ones less than squares do.
            self._noise += _NOISE_MEMORY * (1.25 * abs(error) / predicted - self._noise)
            self._noise = min(max(self._noise, _LEAST_NOISE), _MOST_NOISE)
        gain = shared / variance
        costs += gain * error
        np.maximum(costs, 0.0, out=costs)
        covariance -= gain[:, np.newaxis] * shared

    def _scale(self) -> NDArray[np.float64]:
        """What the costs are doubted in proportion to: themselves, but slopes that fell to 0 can rise again."""
        scale = self._costs.copy()
        per_token = scale[-3] / self._knots[-1]
        scale[-2] = max(scale[-2], _DECODE_PER_TOKEN * per_token)
        scale[-1] = max(scale[-1], _PREFILL_PER_TOKEN * per_token)
        return scale

    def _doubt(self, own: NDArray[np.float64], together: NDArray[np.float64]) -> None:
        """Doubt each cost by itself by so many seconds, and all of them together."""
        self._variances += own * own
        self._covariance += together[:, np.newaxis] * together

    def _variance(self, shared: NDArray[np.float64], features: NDArray[np.float64], predicted: float) -> float:
        """Of a measured time, in squared seconds. `shared` is the covariance of its prediction with every cost."""
        # Rounding may leave less than nothing of a doubt that has been cleared.
        noise = self._noise * predicted
        return max(float(shared @ features), 0.0) + noise * noise

    def _is_mistaken(self, knot: int, deviations: float) -> bool:
        """Whether the model, and not the step, is to blame for a surprise: no step can be too quick, and if those of
        one size are too slow time after time, they did not all wait for something."""
        num_slow = self._slow_steps[knot] + 1 if deviations > _OUTLIER else 0
        is_mistaken = deviations < -_OUTLIER or num_slow == _OUTLIERS_OF_CHANGE
        self._slow_steps[knot] = 0 if is_mistaken else num_slow
        return is_mistaken

    def _begin(self) -> None:
        """Know what was measured at the start, and nothing else."""
        self._slow_steps = [0] * len(self._knots)
        self._noise = _FIRST_NOISE
        self._base = []
        if self._at_start is not None:
            self._believe(self._at_start, _SHARED_SPREAD)

    def _believe(self, base: NDArray[np.float64], spread_together: float) -> None:
        """Start from `base` seconds at the knots; `spread_together` is the relative error that all have in common."""
        knots = np.array(self._knots)
        per_token = float(base[-1] / knots[-1])
        slopes = _DECODE_PER_TOKEN * per_token, _PREFILL_PER_TOKEN * per_token
        self._costs[:] = [*base, *slopes]
        octaves = np.log2(knots)
        alike = np.exp(-np.abs(octaves[:, np.newaxis] - octaves) / _KNOT_DISTANCE)
        own = np.where(self._measured, _MEASURED_SPREAD, _UNMEASURED_SPREAD) * base
        together = spread_together * base
        num_knots = len(knots)
        self._covariance.fill(0.0)
        self._covariance[:num_knots, :num_knots] = alike * np.outer(own, own) + np.outer(together, together)
        self._covariance[num_knots:, num_knots:] = np.diag(np.square(slopes))
        self._publish()

    def _publish(self) -> None:
        """Make the costs quick to look up."""
        self._base = np.maximum.accumulate(self._costs[: len(self._knots)]).tolist()
        self._slopes = float(self._costs[-2]), float(self._costs[-1])

    def _place(self, num_tokens: int) -> tuple[int, float]:
        """The knot above, and the share of the way to it from the one below."""
        knots = self._knots
        upper = min(max(bisect_right(knots, num_tokens), 1), len(knots) - 1)
        below = knots[upper - 1]
        return upper, (min(num_tokens, knots[upper]) - below) / (knots[upper] - below)


def plausible_costs(max_tokens: int, prefill_costs: PrefillCosts) -> dict[int, float]:
    """Measured costs that can be true, ascending: each size takes no less than the one below."""
    costs: dict[int, float] = {}
    least = 0.0
    for num_tokens, seconds in sorted(prefill_costs):
        if 1 <= num_tokens <= max_tokens and 0.0 < seconds < math.inf:
            least = costs[num_tokens] = max(seconds, least)
    return costs


def _between(measured: dict[int, float], knots: NDArray[np.int64]) -> NDArray[np.float64]:
    """Seconds at the knots, from those that were measured."""
    counts = np.array(list(measured), dtype=np.float64)
    seconds = np.interp(knots, counts, list(measured.values()))
    # Below the smallest, a step costs less, but the weights are still to be read; above the largest, in proportion.
    seconds *= np.where(knots < counts[0], 0.7 + 0.3 * knots / counts[0], np.maximum(knots / counts[-1], 1.0))
    return seconds


def _knots(max_tokens: int, measured: dict[int, float]) -> list[int]:
    """Sizes at which the base cost is kept: powers of two and the measured ones, up to `max_tokens`; at least two."""
    knots = {*_FIRST_KNOTS, *measured, max(max_tokens, 2)}
    knots |= {1 << exponent for exponent in range(6, max_tokens.bit_length())}
    return sorted(knot for knot in knots if knot <= max(max_tokens, 2))
