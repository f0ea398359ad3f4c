"""What the sampling kernels share: relative weights, uniform numbers, and the search of a threshold.

The weight of a token is its probability over that of the most likely one, so the largest is 1. Every kernel computes it
by the same operations from the same numbers: weights of one token are equal bits everywhere.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST_EXPONENT = tl.constexpr(-126.0)
"""Binary logarithm of the smallest weight that is not 0."""
LOWEST_WEIGHT = tl.constexpr(2.0**-126)
AFTER_ONE = tl.constexpr(1.0 + 2.0**-23)
"""More than any weight."""


@triton.jit
def weights_of(logits, row_max, scale):
    """Weights of float32 `logits` of a row whose largest is `row_max`; `scale` is LOG2_E over the temperature."""
    exponents = (logits - row_max) * scale
    return tl.where(exponents < LOWEST_EXPONENT, 0.0, tl.exp2(exponents))


@triton.jit
def _mix(x):
    """The finalizer of splitmix64 on uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def uniform(seed, position):
    """float64 in [0, 1) of an int64 seed and the number of tokens put out so far: two rounds of splitmix64."""
    mixed = _mix(seed.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    bits = _mix(mixed + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    return (bits >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def find_threshold(logits_ptr, num_logits, row_max, scale, by_count, base, target, low, high, block: tl.constexpr):
    """A threshold that keeps the fewest of `num_logits` logits for which `base` and the measure of their weights make
    `target` together; `low` if all do not, or if none below `high` are in question.

    The measure of weights is their number, or their sum; `base` belongs to those of at least `high`, unless they are
    among the logits. Weights are compared as bits, of which each round fixes two, until at most one weight lies between
    the bounds.
    """
    lanes = tl.arange(0, block)
    low_bits = low.to(tl.int32, bitcast=True)
    high_bits = high.to(tl.int32, bitcast=True)
    high_measure = tl.full((), 0.0, dtype=tl.float64) + base
    low_measure = high_measure + float("inf")
    one = tl.where(by_count, 1.0, low)
    while (high_bits - low_bits > 1) & (low_measure - high_measure >= 2 * one):
        step = tl.maximum((high_bits - low_bits) // 4, 1)
        first = low_bits + step
        second = tl.minimum(first + step, high_bits - 1)
        third = tl.minimum(second + step, high_bits - 1)
        first_sum = tl.zeros((block,), dtype=tl.float64)
        second_sum = tl.zeros((block,), dtype=tl.float64)
        third_sum = tl.zeros((block,), dtype=tl.float64)
        for start in range(0, num_logits, block):
            inside = start + lanes < num_logits
            logits = tl.load(logits_ptr + start + lanes, mask=inside, other=float("-inf"))
            weights = weights_of(logits, row_max, scale)
            bits = weights.to(tl.int32, bitcast=True)
            values = tl.where(by_count, 1.0, weights).to(tl.float64)
            first_sum += tl.where(inside & (bits >= first), values, 0.0)
            second_sum += tl.where(inside & (bits >= second), values, 0.0)
            third_sum += tl.where(inside & (bits >= third), values, 0.0)
        low_bits, low_measure, high_bits, high_measure = _closed_in(
            first, base + tl.sum(first_sum, axis=0), low_bits, low_measure, high_bits, high_measure, target
        )
        low_bits, low_measure, high_bits, high_measure = _closed_in(
            second, base + tl.sum(second_sum, axis=0), low_bits, low_measure, high_bits, high_measure, target
        )
        low_bits, low_measure, high_bits, high_measure = _closed_in(
            third, base + tl.sum(third_sum, axis=0), low_bits, low_measure, high_bits, high_measure, target
        )
        one = tl.where(by_count, 1.0, low_bits.to(tl.float32, bitcast=True))
    return low_bits.to(tl.float32, bitcast=True)


@triton.jit
def _closed_in(pivot, measure, low, low_measure, high, high_measure, target):
    """Bounds after the measure at a pivot is known; a pivot that is not between them changes nothing."""
    enough = measure >= target
    raises = enough & (pivot > low)
    lowers = (enough == 0) & (pivot < high)
    return (
        tl.where(raises, pivot, low),
        tl.where(raises, measure, low_measure),
        tl.where(lowers, pivot, high),
        tl.where(lowers, measure, high_measure),
    )
