"""Random tokens for the rows of a batch that want them: one call of the native library, or tensor operators."""

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill_engine.sampling import table as columns
from tokenmill_engine.sampling.filters import FilterParams, draw, draw_above_threshold, draw_filtered
from tokenmill_engine.sampling.penalties import apply_penalties
from tokenmill_engine.sampling.random import uniform
from tokenmill_engine.sampling.table import SamplingTable
from tokenmill_engine.sampling.tokens import INVALID_TOKEN, Rows, TokenTable
from tokenmill_kernels.cpu import sampling as native

_PIECE_ELEMENTS: Final = 1 << 24
"""Bound on the elements of one temporary."""


@dataclass(slots=True)
class RandomRows:
    """All rows with a temperature, and the same rows by the way they take through the filters."""

    everything: Rows
    plain: Rows | None
    """No filter."""
    small_top_k: Rows | None
    filtered: Rows | None
    """The others."""

    @classmethod
    def of(cls, features: NDArray[np.uint8], slots: NDArray[np.int32], device: torch.device) -> Self | None:
        """The random rows of a batch with these `features` [n] and `slots` [n]; None if there are none."""
        random, filtered, small = (
            (features & bit) != 0 for bit in (columns.RANDOM, columns.FILTER, columns.SMALL_TOP_K)
        )
        everything = Rows.where(random, slots, device)
        if everything is None:
            return None
        return cls(
            everything,
            plain=Rows.where(random & ~filtered, slots, device),
            small_top_k=Rows.where(random & small, slots, device),
            filtered=Rows.where(random & filtered & ~small, slots, device),
        )


def draw_rows(
    token_ids: torch.Tensor, logits: torch.Tensor, random: RandomRows, table: SamplingTable, tokens: TokenTable
) -> None:
    """Fill in the random rows of `token_ids` (int32 [num_rows]), `INVALID_TOKEN` where `logits`
    (float32 [num_rows, vocab_size]) are no distribution."""
    if logits.device.type == "cpu" and native.is_available():
        _draw_natively(token_ids, logits, random.everything, table, tokens)
        return
    size = max(1, _PIECE_ELEMENTS // logits.shape[1])
    for rows in (random.plain, random.small_top_k, random.filtered):
        for part in rows.pieces(size) if rows is not None else ():
            weights = _weights(logits, part, table)
            # Softmax divides by the sum of the row, which is a number only if no logit spoils it.
            valid = weights[:, 0] == weights[:, 0]
            u = _uniform(part, table, tokens)
            if rows is random.plain:
                drawn = draw(weights, u)
            else:
                drawn = draw_filtered(weights, u, _filters(part, table), small_top_k=rows is random.small_top_k)
            token_ids.index_copy_(0, part.index, torch.where(valid, drawn, INVALID_TOKEN).to(torch.int32))


def sample_rows(
    logits: torch.Tensor, slots: torch.Tensor, features: int, table: SamplingTable, tokens: TokenTable
) -> torch.Tensor:
    """int32 [n]: as `Sampler.sample_on_device`, by tensor operators over all rows."""
    rows = Rows(torch.arange(len(slots), device=slots.device), slots.to(torch.int64).clamp(min=0))
    if features & columns.PENALTY:
        apply_penalties(logits, rows, table.floats, tokens, tokens.token_ids.shape[1])
    token_ids = argmax(logits)
    if features & columns.RANDOM:
        temperature = table.floats[rows.slots, columns.TEMPERATURE, None]
        random = temperature >= columns.GREEDY_BELOW
        weights = (logits / torch.where(random, temperature, 1.0)).softmax(1)
        u = _uniform(rows, table, tokens)
        if features & columns.FILTER:
            drawn = draw_above_threshold(weights, u, _filters(rows, table))
        else:
            drawn = draw(weights, u)
        valid = weights[:, 0] == weights[:, 0]
        token_ids = torch.where(random[:, 0], torch.where(valid, drawn, INVALID_TOKEN).to(torch.int32), token_ids)
    return torch.where(slots < 0, INVALID_TOKEN, token_ids)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """int32 [n]: first largest logit of each row, `INVALID_TOKEN` if it is not a finite number."""
    if logits.device.type == "cpu":
        # NumPy's vectorized argmax is over ten times as fast as torch's here; both stop at a NaN.
        rows = logits.numpy()
        best = rows.argmax(axis=1)
        valid = np.isfinite(rows[np.arange(len(rows)), best])
        return torch.from_numpy(np.where(valid, best, INVALID_TOKEN).astype(np.int32))
    value, index = logits.max(dim=1)
    return torch.where(value.isfinite(), index, INVALID_TOKEN).to(torch.int32)


def _draw_natively(
    token_ids: torch.Tensor, logits: torch.Tensor, rows: Rows, table: SamplingTable, tokens: TokenTable
) -> None:
    floats, top_k = table.floats[rows.slots], table.integers[rows.slots, columns.TOP_K]
    params = native.DrawParams(
        temperature=floats[:, columns.TEMPERATURE],
        top_k=top_k,
        top_p=floats[:, columns.TOP_P],
        min_p=floats[:, columns.MIN_P],
        u=_uniform(rows, table, tokens),
    )
    token_ids.index_copy_(0, rows.index, native.draw(logits, rows.index, params))


def _uniform(rows: Rows, table: SamplingTable, tokens: TokenTable) -> torch.Tensor:
    """float64 [n]: this step's number of each request."""
    position = tokens.num_tokens[rows.slots] - tokens.num_prompt[rows.slots]
    return uniform(table.integers[rows.slots, columns.SEED], position.to(torch.int64))


def _weights(logits: torch.Tensor, rows: Rows, table: SamplingTable) -> torch.Tensor:
    """Probabilities of `rows` after temperature, float32 [n, vocab_size]."""
    if len(rows) != len(logits):
        logits = logits[rows.index]
    return (logits / table.floats[rows.slots, columns.TEMPERATURE, None]).softmax(1)


def _filters(rows: Rows, table: SamplingTable) -> FilterParams:
    floats = table.floats[rows.slots]
    return FilterParams(
        top_k=table.integers[rows.slots, columns.TOP_K, None],
        top_p=floats[:, columns.TOP_P, None],
        min_p=floats[:, columns.MIN_P, None],
    )
