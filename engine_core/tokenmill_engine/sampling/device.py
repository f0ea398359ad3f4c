"""Sampling by the kernels of a GPU: everything about a row is looked up on the device, by its slot."""

import torch

from tokenmill_engine.sampling import table as bits
from tokenmill_engine.sampling.table import SamplingTable
from tokenmill_engine.sampling.tokens import TokenTable
from tokenmill_kernels.gpu import sampling as kernels
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
        self._workspaces = [kernels.Workspace(num_slots, table.vocab_size, table.device)]
        """The last is the largest; graphs may use the others."""

    def sample(self, logits: torch.Tensor, slots: torch.Tensor, features: int) -> torch.Tensor:
        """As `Sampler.sample_on_device`."""
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

    def _workspace(self, num_rows: int) -> kernels.Workspace:
        if num_rows > self._workspaces[-1].max_rows:
            self._workspaces.append(kernels.Workspace(num_rows, self._table.vocab_size, self._table.device))
        return self._workspaces[-1]
