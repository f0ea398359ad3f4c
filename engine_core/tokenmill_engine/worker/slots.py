"""Persistent tables of the requests in slots, on the device: tokens, counts, block tables, sampling parameters.

A plan brings only what changed. All tables are views of one buffer of 32-bit words, so that a step's changes cross
together, whatever tables they are for.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill_engine.outputs import SlotStart, StepPlan
from tokenmill_engine.sampling.table import SamplingTable
from tokenmill_engine.sampling.tokens import TokenTable
from tokenmill_kernels.sampling_columns import NUM_FLOATS, NUM_INTEGERS

Write = tuple[int, NDArray[np.int32] | list[int]]
"""Where in the buffer, and what; not empty."""

_SAMPLING_WORDS = 2 * NUM_INTEGERS + NUM_FLOATS


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
    has_position_deltas: bool = False
    """Positions of tokens may differ from their indexes (M-RoPE)."""

    @property
    def num_words(self) -> int:
        """32-bit words of device memory."""
        num_counts = 4 if self.has_position_deltas else 3
        return self.num_slots * (_SAMPLING_WORDS + self.max_len + num_counts + self.num_groups * self.max_blocks)


class SlotTables:
    """One row per slot in every table."""

    def __init__(self, shape: SlotShape, device: torch.device, *, shared: bool = True) -> None:
        """`shared`: the host can write into the buffer, as `apply` does. Else somebody has to send the `changes`."""
        self.shape = shape
        self.device = device
        num_slots = shape.num_slots
        self.buffer = torch.zeros(shape.num_words, dtype=torch.int32, device=device)
        self._next_offset = 0
        # First, since its numbers of 64 bits have to be aligned.
        integers = self._take(2 * num_slots * NUM_INTEGERS).view(torch.int64).view(num_slots, NUM_INTEGERS)
        self._floats_offset = self._next_offset
        floats = self._take(num_slots * NUM_FLOATS).view(torch.float32).view(num_slots, NUM_FLOATS)
        self._tokens_offset = self._next_offset
        token_ids = self._take(num_slots * shape.max_len).view(num_slots, shape.max_len)
        self._counts_offset = self._next_offset
        self.tokens = TokenTable(token_ids, num_tokens=self._take(num_slots), num_prompt=self._take(num_slots))
        self.num_computed = self._take(num_slots)
        """int32 [num_slots]: tokens whose keys and values are in the cache."""
        self._deltas_offset = self._next_offset
        self.position_deltas = self._take(num_slots) if shape.has_position_deltas else None
        """int32 [num_slots]: what to add to the index of a token for its position, behind what is known otherwise."""
        self._block_offset = self._next_offset
        self.block_tables = [
            self._take(num_slots * shape.max_blocks).view(num_slots, shape.max_blocks) for _ in range(shape.num_groups)
        ]
        """Per KV group, int32 [num_slots, max_blocks]; entries past a request's blocks are old ones."""
        self.num_prompt: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        """Host copy of `tokens.num_prompt`."""
        self.sampling = SamplingTable(num_slots, shape.vocab_size, device, (floats, integers))
        self._host: NDArray[np.int32] | None = self.buffer.numpy() if shared else None

    def _take(self, size: int) -> torch.Tensor:
        view = self.buffer[self._next_offset : self._next_offset + size]
        self._next_offset += size
        return view

    def apply(self, plan: StepPlan) -> None:
        """Write what the plan starts and appends."""
        if self._host is None:
            raise RuntimeError("the tables are out of the host's reach")
        for offset, values in self.changes(plan):
            self._host[offset : offset + len(values)] = values

    def changes(self, plan: StepPlan) -> list[Write]:
        """What the plan starts and appends, as writes into the buffer that do not overlap. The host's copies of what
        starts are up to date with that."""
        writes: list[Write] = []
        if plan.starts:
            self.sampling.start(plan.starts)
            for start in plan.starts:
                self._start(start, writes)
        writes.extend((self._block_index(new.group, new.slot, new.start), new.block_ids) for new in plan.appends)
        for new in plan.known:
            writes.append((self._tokens_offset + new.slot * self.shape.max_len + new.start, new.token_ids))
            writes.append((self._counts_offset + new.slot, [new.start + len(new.token_ids)]))
        return writes

    def delta_changes(self, deltas: Mapping[int, int]) -> list[Write]:
        """As `changes`, which they do not overlap: position deltas by slot. The shape must have them."""
        return [(self._deltas_offset + slot, [delta]) for slot, delta in deltas.items()]

    def sampled_changes(self, plan: StepPlan) -> list[Write]:
        """As `changes`, which they do not overlap: the tokens of `plan.sampled`, but for those of slots that the plan
        starts, whose requests are gone."""
        sampled = plan.sampled
        if sampled is None:
            return []
        started = {start.slot for start in plan.starts}
        offsets = (
            self._tokens_offset + sampled.slots.astype(np.int64) * self.shape.max_len + sampled.positions
        ).tolist()
        columns = zip(offsets, sampled.token_ids.tolist(), sampled.slots.tolist(), strict=True)
        return [(offset, [token_id]) for offset, token_id, slot in columns if slot not in started]

    def _start(self, start: SlotStart, writes: list[Write]) -> None:
        slot, num_slots = start.slot, self.shape.num_slots
        self.num_prompt[slot] = start.num_prompt_tokens
        floats, integers = self.sampling.host_row(slot)
        writes.append((slot * 2 * NUM_INTEGERS, integers.view(np.int32).tolist()))
        writes.append((self._floats_offset + slot * NUM_FLOATS, floats.view(np.int32).tolist()))
        writes.append((self._tokens_offset + slot * self.shape.max_len, start.token_ids))
        counts = (len(start.token_ids), start.num_prompt_tokens, start.num_computed_tokens)
        writes.extend((self._counts_offset + table * num_slots + slot, [count]) for table, count in enumerate(counts))
        for group, block_ids in enumerate(start.block_ids):
            if block_ids:
                writes.append((self._block_index(group, slot, 0), block_ids))

    def _block_index(self, group: int, slot: int, start: int) -> int:
        return self._block_offset + (group * self.shape.num_slots + slot) * self.shape.max_blocks + start
