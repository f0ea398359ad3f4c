"""From logits to the next token of every request of a batch.

The order for one row: allowed tokens, forbidden words and end tokens, logit bias; penalties; then the largest logit,
or temperature, filters and a random draw. A batch that needs none of it costs one argmax.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill_engine.sampling import table as columns
from tokenmill_engine.sampling.edits import EditBatch
from tokenmill_engine.sampling.filters import FilterParams, draw, draw_filtered
from tokenmill_engine.sampling.logprobs import Logprobs, RawScores
from tokenmill_engine.sampling.penalties import apply_penalties
from tokenmill_engine.sampling.random import uniform
from tokenmill_engine.sampling.table import SamplingTable
from tokenmill_engine.sampling.tokens import Rows, TokenTable
from tokenmill_engine.sampling.transfer import to_device

INVALID_TOKEN: Final = -1
"""Stands for the token of a row whose logits are not numbers, or all masked."""

_PIECE_ELEMENTS: Final = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Bound on the elements of one temporary of the random path: for the caches, for the memory."""


@dataclass(slots=True)
class Sampled:
    """Of n rows, on the device."""

    token_ids: torch.Tensor
    """int32 [n]; `INVALID_TOKEN` where there is none."""
    logprobs: Logprobs | None = None
    logprob_rows: NDArray[np.int64] | None = None
    """[m] rows that `logprobs` speaks of."""


class SamplingBatch:
    """Which rows of a batch need what. Serves every step that samples the same slots in the same order."""

    def __init__(self, slots: NDArray[np.int32], table: SamplingTable) -> None:
        device = table.device
        features = table.features[slots]
        self.any_feature = bool(np.bitwise_or.reduce(features, initial=0))
        if not self.any_feature:
            return
        slots64 = slots.astype(np.int64)

        def select(mask: NDArray[np.bool_]) -> Rows | None:
            index = np.flatnonzero(mask)
            return Rows(to_device(index, device), to_device(slots64[index], device)) if len(index) else None

        random, filtered, small, penalized, edited, reports = (
            (features & bit) != 0
            for bit in (
                columns.RANDOM,
                columns.FILTER,
                columns.SMALL_TOP_K,
                columns.PENALTY,
                columns.EDIT,
                columns.LOGPROBS,
            )
        )
        self.num_rows = len(slots)
        self.any_random, self.all_random = bool(random.any()), bool(random.all())
        self.plain = select(random & ~filtered)
        self.small_top_k = select(random & small)
        self.filtered = select(random & filtered & ~small)
        self.penalties = select(penalized)
        self.edits: EditBatch | None = None
        if edited.any():
            rows = np.flatnonzero(edited)
            edits = [table.edits[int(slot)] for slot in slots[rows]]
            self.edits = EditBatch(rows, slots64[rows], edits, table.vocab_size, device)
        self.logprobs = select(reports)
        self.logprob_rows = np.flatnonzero(reports)
        self.num_top = int(table.num_logprobs[slots[self.logprob_rows]].max(initial=0))

    @property
    def changes_logits(self) -> bool:
        return self.edits is not None or self.penalties is not None


class Sampler:
    """Samples batches of requests whose parameters are in `table` and whose tokens are in `tokens`."""

    def __init__(self, table: SamplingTable, tokens: TokenTable) -> None:
        self._table = table
        self._tokens = tokens
        self._batch_key: tuple[int, bytes] | None = None
        self._batch: SamplingBatch | None = None

    def batch(self, slots: NDArray[np.int32]) -> SamplingBatch:
        """The plan for the rows of `slots`, made anew only when they or their parameters change."""
        key = (self._table.version, slots.tobytes())
        if self._batch is None or key != self._batch_key:
            self._batch, self._batch_key = SamplingBatch(slots, self._table), key
        return self._batch

    def sample(self, logits: torch.Tensor, slots: NDArray[np.int32], max_tokens: int) -> Sampled:
        """One token for each row.

        Args:
            logits: float32 [n, vocab_size], contiguous; overwritten.
            slots: [n] slot of each row.
            max_tokens: no row has more known tokens than that.
        """
        batch = self.batch(slots)
        if not batch.any_feature:
            return Sampled(_argmax(logits))
        raw = None
        if batch.logprobs is not None:
            intact = len(batch.logprobs) == batch.num_rows and not batch.changes_logits
            raw = RawScores(logits if intact else logits[batch.logprobs.index])
        if batch.edits is not None:
            batch.edits.apply(logits, self._tokens)
        if batch.penalties is not None:
            apply_penalties(logits, batch.penalties, self._table.floats, self._tokens, max_tokens)
        token_ids = self._choose(logits, batch)
        if raw is None or batch.logprobs is None:
            return Sampled(token_ids)
        chosen = token_ids[batch.logprobs.index].clamp(min=0).to(torch.int64)
        return Sampled(token_ids, raw.score(chosen, batch.num_top), batch.logprob_rows)

    def _choose(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """int32 [n]"""
        if not batch.any_random:
            return _argmax(logits)
        if batch.all_random:
            token_ids = torch.empty(batch.num_rows, dtype=torch.int32, device=logits.device)
        else:
            token_ids = _argmax(logits)
        piece = max(1, _PIECE_ELEMENTS[logits.device.type] // logits.shape[1])
        for rows in (batch.plain, batch.small_top_k, batch.filtered):
            for part in rows.pieces(piece) if rows is not None else ():
                weights, u = self._weights(logits, part)
                # Softmax divides by the sum of the row, which is a number only if no logit spoils it.
                valid = weights[:, 0] == weights[:, 0]
                if rows is batch.plain:
                    drawn = draw(weights, u)
                else:
                    drawn = draw_filtered(weights, u, self._filters(part), small_top_k=rows is batch.small_top_k)
                token_ids.index_copy_(0, part.index, torch.where(valid, drawn, INVALID_TOKEN).to(torch.int32))
        return token_ids

    def _weights(self, logits: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities after temperature, float32 [n, vocab_size], and uniform numbers, float64 [n], of `rows`."""
        if len(rows) != len(logits):
            logits = logits[rows.index]
        weights = (logits / self._table.floats[rows.slots, columns.TEMPERATURE, None]).softmax(1)
        position = self._tokens.num_tokens[rows.slots] - self._tokens.num_prompt[rows.slots]
        return weights, uniform(self._table.integers[rows.slots, columns.SEED], position.to(torch.int64))

    def _filters(self, rows: Rows) -> FilterParams:
        floats = self._table.floats[rows.slots]
        return FilterParams(
            top_k=self._table.integers[rows.slots, columns.TOP_K, None],
            top_p=floats[:, columns.TOP_P, None],
            min_p=floats[:, columns.MIN_P, None],
        )


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """int32 [n]: first largest logit of each row, `INVALID_TOKEN` if it is not a finite number."""
    if logits.device.type == "cpu":
        # NumPy's vectorized argmax is over ten times as fast as torch's here; both stop at a NaN.
        rows = logits.numpy()
        best = rows.argmax(axis=1)
        valid = np.isfinite(rows[np.arange(len(rows)), best])
        return torch.from_numpy(np.where(valid, best, INVALID_TOKEN).astype(np.int32))
    value, index = logits.max(dim=1)
    return torch.where(value.isfinite(), index, INVALID_TOKEN).to(torch.int32)
