"""Persistent tables of the requests in slots, on the device: tokens, counts, block tables, sampling parameters.

A plan brings only what changed. All integer tables are views of one buffer, so that a step's changes cross together,
whatever tables they are for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill_engine.outputs import StepPlan
from tokenmill_engine.sampling.table import SamplingTable
from tokenmill_engine.sampling.tokens import TokenTable

Write = tuple[int, NDArray[np.int32] | list[int]]
"""Where in the buffer, and what."""


@dataclass(slots=True, frozen=True)
class SlotShape:
    """Sizes of the tables."""

    num_slots: int
    max_len: int
    """Tokens a row holds."""
    max_blocks: int
    """Blocks a row holds in each KV group."""
    num_groups: int
    vocab_size: int

    @property
    def num_bytes(self) -> int:
        """Device memory of the integer tables."""
        return 4 * self.num_slots * (self.max_len + 3 + self.num_groups * self.max_blocks)


class TableWriter(Protocol):
    """Writes into the buffer behind the tables."""

    def write(self, writes: Sequence[Write]) -> None:
        """Put every run of values into its place; the places do not overlap, and no run is empty."""


class SharedWriter:
    """Where host and device share memory."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._host: NDArray[np.int32] = buffer.numpy()

    def write(self, writes: Sequence[Write]) -> None:
        for offset, values in writes:
            self._host[offset : offset + len(values)] = values


class SlotTables:
    """One row per slot in every table."""

    def __init__(
        self,
        shape: SlotShape,
        device: torch.device,
        make_writer: Callable[[torch.Tensor], TableWriter] = SharedWriter,
    ) -> None:
        self.shape = shape
        self.device = device
        num_slots = shape.num_slots
        self._buffer = torch.zeros(shape.num_bytes // 4, dtype=torch.int32, device=device)
        self._writer = make_writer(self._buffer)
        self._next_offset = 0
        self.tokens = TokenTable(
            token_ids=self._take(num_slots * shape.max_len).view(num_slots, shape.max_len),
            num_tokens=self._take(num_slots),
            num_prompt=self._take(num_slots),
        )
        self.num_computed = self._take(num_slots)
        """int32 [num_slots]: tokens whose keys and values are in the cache."""
        self._block_offset = self._next_offset
        self.block_tables = [
            self._take(num_slots * shape.max_blocks).view(num_slots, shape.max_blocks) for _ in range(shape.num_groups)
        ]
        """Per KV group, int32 [num_slots, max_blocks]; entries past a request's blocks are old ones."""
        self.num_prompt: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        """Host copy of `tokens.num_prompt`."""
        self.sampling = SamplingTable(num_slots, shape.vocab_size, device)

    def _take(self, size: int) -> torch.Tensor:
        view = self._buffer[self._next_offset : self._next_offset + size]
        self._next_offset += size
        return view

    def apply(self, plan: StepPlan) -> None:
        """Write what the plan starts and appends."""
        if not plan.starts and not plan.appends:
            return
        shape, num_slots = self.shape, self.shape.num_slots
        counts_offset = num_slots * shape.max_len
        writes: list[Write] = []
        for start in plan.starts:
            slot, num_tokens = start.slot, len(start.token_ids)
            self.num_prompt[slot] = start.num_prompt_tokens
            writes.append((slot * shape.max_len, start.token_ids))
            counts = (num_tokens, start.num_prompt_tokens, start.num_computed_tokens)
            for table, count in enumerate(counts):
                writes.append((counts_offset + table * num_slots + slot, [count]))
            for group, block_ids in enumerate(start.block_ids):
                if block_ids:
                    writes.append((self._block_index(group, slot, 0), block_ids))
        writes.extend((self._block_index(new.group, new.slot, new.start), new.block_ids) for new in plan.appends)
        self._writer.write(writes)
        self.sampling.start(plan.starts)

    def _block_index(self, group: int, slot: int, start: int) -> int:
        return self._block_offset + (group * self.shape.num_slots + slot) * self.shape.max_blocks + start
