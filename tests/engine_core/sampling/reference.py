"""Row by row, in float64 and plain Python: what the batched sampler must agree with."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.messages import SamplingParams

FILTERS = [
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 64, "top_p": 0.9},
    {"top_k": 300},
    {"top_k": 500, "top_p": 0.5, "min_p": 0.001},
    {"top_p": 0.05},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"min_p": 0.1},
    {"min_p": 1e-6},
    {"min_p": 1.0},
    {"min_p": 0.02, "top_p": 0.8},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.05},
]
"""Parameters that take every way through the filters."""


def edited_logits(
    logits: NDArray[np.float64],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_token_ids: Sequence[int],
) -> NDArray[np.float64]:
    """Allow-list, forbidden words, end tokens, bias, penalties."""
    x = logits.astype(np.float64).copy()
    if params.allowed_token_ids is not None:
        for token in range(len(x)):
            if token not in params.allowed_token_ids:
                x[token] = -math.inf
    for word in params.bad_words_token_ids:
        prefix = list(word[:-1])
        if not prefix or list(output[-len(prefix) :]) == prefix:
            x[word[-1]] = -math.inf
    if len(output) < params.min_tokens:
        x[list(stop_token_ids)] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in {*prompt, *output}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token, count in Counter(output).items():
        x[token] -= count * params.frequency_penalty + params.presence_penalty
    return x


def softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(x - x.max())
    result: NDArray[np.float64] = weights / weights.sum()
    return result


def distribution(logits: NDArray[np.float64], params: SamplingParams) -> NDArray[np.float64]:
    """Probabilities after temperature, min_p, top_k and top_p, each filter by a full sort; ties are kept."""
    x = logits / params.temperature
    p = softmax(x)
    x = np.where(p < params.min_p * p.max(), -math.inf, x)
    if 0 < params.top_k < len(x):
        x = np.where(x < np.sort(x)[-params.top_k], -math.inf, x)
    if params.top_p < 1.0:
        p = softmax(x)
        descending = np.sort(p)[::-1]
        before = np.cumsum(descending) - descending
        last_kept = descending[before < params.top_p][-1]
        x = np.where(p < last_kept, -math.inf, x)
    return softmax(x)


def inverse_cdf(p: NDArray[np.float64], u: float) -> int:
    return int(np.searchsorted(np.cumsum(p), u * p.sum(), side="right"))


def expect_token(token: int, p: NDArray[np.float64], u: float) -> None:
    """`token` is the reference's, unless `u` lies within float32 rounding of the border between two tokens."""
    expected = inverse_cdf(p, u)
    if token != expected:
        ends = np.cumsum(p)
        assert p[token] > 0
        low, high = (ends[token] - p[token], ends[token])
        assert low - 2e-6 <= u <= high + 2e-6


def expect_frequencies(counts: NDArray[np.int64], p: NDArray[np.float64]) -> None:
    """`counts` [vocab_size] of drawn tokens pass a chi-square test against `p`; nothing impossible was drawn."""
    num_draws = counts.sum()
    assert counts[p == 0].sum() == 0
    # Cells with few expected draws are joined, as the chi-square approximation wants.
    rare = (p > 0) & (p * num_draws < 10)
    observed = np.append(counts[(p > 0) & ~rare], counts[rare].sum())
    expected = np.append(p[(p > 0) & ~rare], p[rare].sum()) * num_draws
    observed, expected = observed[expected > 0], expected[expected > 0]
    chi_square = ((observed - expected) ** 2 / expected).sum()
    degrees = max(1, len(expected) - 1)
    assert chi_square < degrees + 5 * np.sqrt(2 * degrees) + 10


_MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, position: int) -> float:
    increment = 0x9E3779B97F4A7C15
    mixed = _mix((seed + increment) & _MASK)
    return (_mix((mixed + (position + 1) * increment) & _MASK) >> 11) / 2**53
