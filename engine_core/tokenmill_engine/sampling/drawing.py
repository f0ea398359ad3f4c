"""The tokens of a batch on the CPU: one call of the native library for the random ones, or tensor operators, which are
what the kernels of a GPU are tested against."""

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill_engine.sampling import table as bits
from tokenmill_engine.sampling.filters import FilterParams, draw, draw_above_threshold, draw_filtered
from tokenmill_engine.sampling.penalties import apply_penalties
from tokenmill_engine.sampling.random import uniform
from tokenmill_engine.sampling.table import SamplingTable
from tokenmill_engine.sampling.tokens import INVALID_TOKEN, Rows, TokenTable
from tokenmill_kernels import sampling_columns as columns
from tokenmill_kernels.cpu import sampling as native

_PIECE_ELEMENTS: Final = 1 << 24
"""Bound on the elements of one temporary."""


@dataclass(slots=True)
class HostRows:
    """Rows of a batch by what they need."""

    num_rows: int
    penalized: Rows | None
    random: Rows | None
    """All rows with a temperature. The following are the same rows by the way they take through the filters."""
    plain: Rows | None
    """No filter."""
    small_top_k: Rows | None
    filtered: Rows | None
    """The others."""

    @classmethod
    def of(cls, features: NDArray[np.uint8], slots: NDArray[np.int32]) -> Self:
        """The rows of a batch with these `features` [n] and `slots` [n]."""
        random, filtered, small, penalized = (
            (features & bit) != 0 for bit in (bits.RANDOM, bits.FILTER, bits.SMALL_TOP_K, bits.PENALTY)
        )
        return cls(
            num_rows=len(slots),
            penalized=Rows.where(penalized, slots),
            random=Rows.where(random, slots),
            plain=Rows.where(random & ~filtered, slots),
            small_top_k=Rows.where(random & small, slots),
            filtered=Rows.where(random & filtered & ~small, slots),
        )


def choose_rows(
    logits: torch.Tensor, rows: HostRows, table: SamplingTable, tokens: TokenTable, max_tokens: int
) -> torch.Tensor:
    """int32 [n]: the token of each row of `logits` (float32 [n, vocab_size], contiguous; overwritten), `INVALID_TOKEN`
    where they are no distribution. No row has more than `max_tokens` known tokens."""
    if rows.penalized is not None:
        apply_penalties(logits, rows.penalized, table.floats, tokens, max_tokens)
    if rows.random is None:
        return argmax(logits)
    all_random = len(rows.random) == rows.num_rows
    token_ids = torch.empty(rows.num_rows, dtype=torch.int32) if all_random else argmax(logits)
    if native.is_available():
        _draw_natively(token_ids, logits, rows.random, table, tokens)
    else:
        _draw_by_operators(token_ids, logits, rows, table, tokens)
    return token_ids


def _draw_by_operators(
    token_ids: torch.Tensor, logits: torch.Tensor, rows: HostRows, table: SamplingTable, tokens: TokenTable
) -> None:
    size = max(1, _PIECE_ELEMENTS // logits.shape[1])
    for kind in (rows.plain, rows.small_top_k, rows.filtered):
        for part in kind.pieces(size) if kind is not None else ():
            weights = _weights(logits, part, table)
            u = _uniform(part, table, tokens)
            if kind is rows.plain:
                drawn = draw(weights, u)
            else:
                drawn = draw_filtered(weights, u, _filters(part, table), small_top_k=kind is rows.small_top_k)
            token_ids.index_copy_(0, part.index, _where_valid(weights, drawn))


def _where_valid(weights: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """int32 [n]: `drawn`, or `INVALID_TOKEN`. Softmax divides by the sum of the row, which is a number only if no logit
    spoils it."""
    return torch.where(weights[:, 0] == weights[:, 0], drawn, INVALID_TOKEN).to(torch.int32)


def sample_rows(
    logits: torch.Tensor, slots: torch.Tensor, features: int, table: SamplingTable, tokens: TokenTable
) -> torch.Tensor:
    """int32 [n]: as `Sampler.sample_on_device`, by tensor operators over all rows."""
    rows = Rows(torch.arange(len(slots), device=slots.device), slots.to(torch.int64).clamp(min=0))
    if features & bits.PENALTY:
        apply_penalties(logits, rows, table.floats, tokens, tokens.token_ids.shape[1])
    token_ids = argmax(logits)
    if features & bits.RANDOM:
        temperature = table.floats[rows.slots, columns.TEMPERATURE, None]
        random = temperature > 0
        weights = (logits / torch.where(random, temperature, 1.0)).softmax(1)
        u = _uniform(rows, table, tokens)
        filtered = bool(features & bits.FILTER)
        drawn = draw_above_threshold(weights, u, _filters(rows, table)) if filtered else draw(weights, u)
        token_ids = torch.where(random[:, 0], _where_valid(weights, drawn), token_ids)
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
