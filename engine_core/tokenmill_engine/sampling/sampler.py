"""From logits to the next token of every request of a batch.

The order for one row: allowed tokens, forbidden words and end tokens, logit bias; what its grammar allows; penalties;
then the largest logit, or temperature, filters and a random draw. A batch that needs none of it costs one argmax.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill_engine.sampling import table as bits
from tokenmill_engine.sampling.drawing import HostRows, argmax, choose_rows, sample_rows
from tokenmill_engine.sampling.edits import EditBatch
from tokenmill_engine.sampling.logprobs import Logprobs, RawScores
from tokenmill_engine.sampling.masks import SampleMasks, apply_on_host
from tokenmill_engine.sampling.table import SamplingTable
from tokenmill_engine.sampling.tokens import TokenTable
from tokenmill_engine.sampling.transfer import to_device
from tokenmill_engine.sampling.wanted import WantedTokens


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
        self.features = int(np.bitwise_or.reduce(features, initial=0))
        self.num_rows = len(slots)
        self.edits: EditBatch | None = None
        if self.features & bits.EDIT:
            rows = np.flatnonzero(features & bits.EDIT)
            edits = [table.edits[slot] for slot in slots[rows].tolist()]
            self.edits = EditBatch(rows, slots[rows].astype(np.int64), edits, table.vocab_size, device)
        self.logprob_rows: NDArray[np.int64] | None = None
        self.wanted: WantedTokens | None = None
        if self.features & bits.LOGPROBS:
            self.logprob_rows = np.flatnonzero(features & bits.LOGPROBS)
            self.logprob_index = to_device(self.logprob_rows, device)
            scored = slots[self.logprob_rows]
            self.num_top = int(table.num_logprobs[scored].max())
            wanted = {row: table.wanted[slot] for row, slot in enumerate(scored.tolist()) if slot in table.wanted}
            if wanted:
                self.wanted = WantedTokens(list(wanted), list(wanted.values()), device)
        # Kernels find their rows themselves.
        self.slots = to_device(slots.copy(), device) if device.type != "cpu" else None
        self.host_rows = HostRows.of(features, slots) if device.type == "cpu" else None

    @property
    def changes_logits(self) -> bool:
        return bool(self.features & (bits.EDIT | bits.PENALTY))


class Sampler:
    """Samples batches of requests whose parameters are in `table` and whose tokens are in `tokens`."""

    def __init__(self, table: SamplingTable, tokens: TokenTable) -> None:
        self._table = table
        self._tokens = tokens
        self._batch_key: tuple[int, bytes] | None = None
        self._batch: SamplingBatch | None = None
        self._masks: SampleMasks | None = None
        """Of a CPU that stands in for a GPU."""
        self._device = None
        if table.device.type == "cuda":
            # Machines without a GPU never load its kernels.
            from tokenmill_engine.sampling.device import DeviceSampler

            self._device = DeviceSampler(table, tokens)

    def batch(self, slots: NDArray[np.int32]) -> SamplingBatch:
        """The plan for the rows of `slots`, made anew only when they or their parameters change."""
        key = (self._table.version, slots.tobytes())
        if self._batch is None or key != self._batch_key:
            self._batch, self._batch_key = SamplingBatch(slots, self._table), key
        return self._batch

    def features(self, slots: NDArray[np.int32]) -> int:
        """The feature bits of `sampling.table` that any request in `slots` [n] switches on, on the host."""
        return int(np.bitwise_or.reduce(self._table.features[slots], initial=0))

    def load_masks(self, masks: SampleMasks | None) -> None:
        """Enqueue: `sample_on_device` with `MASK` obeys these from now on."""
        if self._device is not None:
            self._device.load_masks(masks)
        else:
            self._masks = masks

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
        if self._device is not None:
            return self._device.sample(logits, slots, features)
        if features & bits.MASK and self._masks is not None:
            apply_on_host(logits, self._masks)
        return sample_rows(logits, slots, features, self._table, self._tokens)

    def sample(
        self, logits: torch.Tensor, slots: NDArray[np.int32], max_tokens: int, masks: SampleMasks | None = None
    ) -> Sampled:
        """One token for each row.

        Args:
            logits: float32 [n, vocab_size], contiguous; overwritten.
            slots: [n] slot of each row.
            max_tokens: no row has more known tokens than that.
            masks: what grammars allow; None: everything.
        """
        batch = self.batch(slots)
        raw = None
        if batch.logprob_rows is not None:
            intact = len(batch.logprob_rows) == batch.num_rows and not batch.changes_logits and masks is None
            raw = RawScores(logits if intact else logits[batch.logprob_index])
        if batch.edits is not None:
            batch.edits.apply(logits, self._tokens)
        if masks is not None:
            self._apply_masks(logits, masks)
        token_ids = self._choose(logits, batch, max_tokens)
        if raw is None:
            return Sampled(token_ids)
        chosen = token_ids[batch.logprob_index].clamp(min=0).to(torch.int64)
        scores = raw.score(chosen, batch.num_top)
        if batch.wanted is not None:
            batch.wanted.put(scores, raw)
        return Sampled(token_ids, scores, batch.logprob_rows)

    def _apply_masks(self, logits: torch.Tensor, masks: SampleMasks) -> None:
        if self._device is not None:
            self._device.load_masks(masks)
            self._device.apply_masks(logits)
        else:
            apply_on_host(logits, masks)

    def _choose(self, logits: torch.Tensor, batch: SamplingBatch, max_tokens: int) -> torch.Tensor:
        """int32 [n]"""
        if self._device is not None and batch.slots is not None:
            return self._device.sample(logits, batch.slots, batch.features)
        if batch.host_rows is None:
            return argmax(logits)
        return choose_rows(logits, batch.host_rows, self._table, self._tokens, max_tokens)
