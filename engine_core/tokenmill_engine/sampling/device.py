"""Sampling by the kernels of a GPU: everything about a row is looked up on the device, by its slot."""

import numpy as np
import torch

from tokenmill_engine.sampling import table as bits
from tokenmill_engine.sampling.masks import SampleMasks
from tokenmill_engine.sampling.table import SamplingTable
from tokenmill_engine.sampling.tokens import TokenTable
from tokenmill_engine.sampling.transfer import to_device
from tokenmill_kernels.gpu import sampling as kernels
from tokenmill_kernels.gpu import sampling_masks as masks
from tokenmill_kernels.gpu import sampling_penalties as penalties


class DeviceSampler:
    """Holds the memory that the kernels share. One stream uses it at a time."""

    def __init__(self, table: SamplingTable, tokens: TokenTable) -> None:
        self._table = table
        self._tables = kernels.SamplingTables(
            floats=table.floats,
            integers=table.integers,
            token_ids=tokens.token_ids,
            num_tokens=tokens.num_tokens,
            num_prompt=tokens.num_prompt,
        )
        num_slots = len(table.features)
        self._counters = penalties.allocate_counters(num_slots, table.vocab_size, table.device)
        self._masks = masks.allocate_masks(num_slots, table.vocab_size, table.device)
        self._has_masks = False
        self._workspaces = [kernels.Workspace(num_slots, table.vocab_size, table.device)]
        """The last is the largest; graphs may use the others."""

    def sample(self, logits: torch.Tensor, slots: torch.Tensor, features: int) -> torch.Tensor:
        """As `Sampler.sample_on_device`."""
        if features & bits.MASK:
            masks.apply_masks(logits, self._masks)
        if features & bits.PENALTY:
            penalties.apply_penalties(logits, slots, self._tables, self._counters)
        return kernels.choose_tokens(
            logits,
            slots,
            self._tables,
            self._workspace(len(slots)),
            random=bool(features & bits.RANDOM),
            filtered=bool(features & bits.FILTER),
        )

    def load_masks(self, wanted: SampleMasks | None) -> None:
        """Enqueue: from now on steps with `MASK` obey these, and no others."""
        if wanted is None and not self._has_masks:
            return
        entries = np.full(len(self._masks.entries), -1, np.int32)
        if wanted is not None:
            entries[wanted.rows] = np.arange(len(wanted.rows), dtype=np.int32)
            sent = to_device(wanted.bits, self._table.device)
            self._masks.bits[: len(sent)].copy_(sent)
        self._masks.entries.copy_(to_device(entries, self._table.device))
        self._has_masks = wanted is not None

    def apply_masks(self, logits: torch.Tensor) -> None:
        """Enqueue: obey the masks that were loaded."""
        masks.apply_masks(logits, self._masks)

    def _workspace(self, num_rows: int) -> kernels.Workspace:
        if num_rows > self._workspaces[-1].max_rows:
            self._workspaces.append(kernels.Workspace(num_rows, self._table.vocab_size, self._table.device))
        return self._workspaces[-1]
