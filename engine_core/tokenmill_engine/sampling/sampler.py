"""From logits to the next token of every request of a batch.

The order for one row: allowed tokens, forbidden words and end tokens, logit bias; penalties; then the largest logit,
or temperature, filters and a random draw. A batch that needs none of it costs one argmax.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill_engine.sampling import table as columns
from tokenmill_engine.sampling.drawing import RandomRows, argmax, draw_rows, sample_rows
from tokenmill_engine.sampling.edits import EditBatch
from tokenmill_engine.sampling.logprobs import Logprobs, RawScores
from tokenmill_engine.sampling.penalties import apply_penalties
from tokenmill_engine.sampling.table import SamplingTable
from tokenmill_engine.sampling.tokens import Rows, TokenTable


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
        penalized, edited, reports = (
            (features & bit) != 0 for bit in (columns.PENALTY, columns.EDIT, columns.LOGPROBS)
        )
        self.num_rows = len(slots)
        self.random = RandomRows.of(features, slots, device)
        self.penalties = Rows.where(penalized, slots, device)
        self.edits: EditBatch | None = None
        if edited.any():
            rows = np.flatnonzero(edited)
            edits = [table.edits[int(slot)] for slot in slots[rows]]
            self.edits = EditBatch(rows, slots[rows].astype(np.int64), edits, table.vocab_size, device)
        self.logprobs = Rows.where(reports, slots, device)
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

    def features(self, slots: NDArray[np.int32]) -> int:
        """The feature bits of `sampling.table` that any request in `slots` [n] switches on, on the host."""
        return int(np.bitwise_or.reduce(self._table.features[slots], initial=0))

    def sample_on_device(self, logits: torch.Tensor, slots: torch.Tensor, features: int) -> torch.Tensor:
        """One token for each row, decided on the device alone, so that a CUDA graph can hold it.

        Every row finds its parameters, tokens and counts in the tables by its slot when the kernels run. A graph
        captured for a set of features serves any batch that needs no others: `features(slots) & ~captured == 0`.

        Args:
            logits: float32 [n, vocab_size], contiguous rows; overwritten.
            slots: int32 [n] on the device; -1 for padding, whose logits may be anything.
            features: bits that rows may have, within `sampling.table.ON_DEVICE`. They choose which kernels are
                launched (none but an argmax for 0); rows without a feature do not pay for it beyond that.
        Returns:
            int32 [n], `INVALID_TOKEN` for padding and where the logits are no distribution. On CUDA memory of its own,
            or of the graph that is being captured.
        """
        return sample_rows(logits, slots, features, self._table, self._tokens)

    def sample(self, logits: torch.Tensor, slots: NDArray[np.int32], max_tokens: int) -> Sampled:
        """One token for each row.

        Args:
            logits: float32 [n, vocab_size], contiguous; overwritten.
            slots: [n] slot of each row.
            max_tokens: no row has more known tokens than that.
        """
        batch = self.batch(slots)
        if not batch.any_feature:
            return Sampled(argmax(logits))
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
        if batch.random is None:
            return argmax(logits)
        if len(batch.random.everything) == batch.num_rows:
            token_ids = torch.empty(batch.num_rows, dtype=torch.int32, device=logits.device)
        else:
            token_ids = argmax(logits)
        draw_rows(token_ids, logits, batch.random, self._table, self._tokens)
        return token_ids
