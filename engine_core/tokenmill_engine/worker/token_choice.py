"""From hidden states to tokens: the LM head and the sampler, one operator after the other."""

import torch

from tokenmill_engine.models.dense_decoder import DenseDecoder
from tokenmill_engine.sampling import table as bits
from tokenmill_engine.sampling.masks import SampleMasks
from tokenmill_engine.sampling.sampler import Sampled, Sampler
from tokenmill_engine.worker.inputs import StepRows
from tokenmill_engine.worker.slots import SlotTables


class TokenChooser:
    """Samples what the parameters in `tables` ask for."""

    def __init__(self, model: DenseDecoder, tables: SlotTables) -> None:
        self._model = model
        self._sampler = Sampler(tables.sampling, tables.tokens)
        self._device = tables.device

    def choose(self, hidden: torch.Tensor, rows: StepRows, masks: SampleMasks | None) -> Sampled:
        """One token for each sampling row, from its `hidden` state (padding may follow), that `masks` allow."""
        num_samples = len(rows.sample_rows)
        if num_samples == 0:
            return Sampled(torch.empty(0, dtype=torch.int32, device=self._device))
        hidden = hidden[:num_samples]
        if self._model.makes_vectors:
            return Sampled(_meaningless(hidden))
        if self.features(rows, masks) == 0:
            return Sampled(self._model.argmax_token(hidden).to(torch.int32))
        logits = self._model.compute_logits(hidden)
        return self._sampler.sample(logits, rows.sample_slots, rows.max_tokens, masks)

    def features(self, rows: StepRows, masks: SampleMasks | None) -> int:
        """Bits of `sampling.table` that any of the rows needs."""
        mask = 0 if masks is None else bits.MASK
        return self._sampler.features(rows.sample_slots) | mask

    def load_masks(self, masks: SampleMasks | None) -> None:
        """Enqueue: what `choose_on_device` with the feature `MASK` obeys."""
        self._sampler.load_masks(masks)

    def choose_on_device(self, hidden: torch.Tensor, slots: torch.Tensor, features: int) -> torch.Tensor:
        """int32 or int64 [n]: as `choose`, for rows that need no more than `features`, without a look at them on the
        host. `slots` are int32 [n] on the device, -1 for padding."""
        if self._model.makes_vectors:
            return _meaningless(hidden)
        if features == 0:
            return self._model.argmax_token(hidden)
        return self._sampler.sample_on_device(self._model.compute_logits(hidden), slots, features)


def _meaningless(hidden: torch.Tensor) -> torch.Tensor:
    """A token for each row of a model that makes vectors: its request ends without looking at it."""
    return torch.zeros(len(hidden), dtype=torch.int32, device=hidden.device)
