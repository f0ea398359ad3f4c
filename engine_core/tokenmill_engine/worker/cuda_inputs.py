"""Step inputs on a GPU: the host sends one small array, kernels expand it from the tables in device memory.

All tensors of a batch are views of buffers that live as long as the worker, so a graph captured on them can be
replayed for later steps of the same shape.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill_engine.attention.batch import ForwardBatch, KVGroupBatch
from tokenmill_engine.outputs import StepPlan
from tokenmill_engine.worker.inputs import StepRows, last_tokens
from tokenmill_engine.worker.shapes import StepShape
from tokenmill_engine.worker.slots import SlotTables
from tokenmill_kernels.gpu import state

_NO_SLOT = -1
_NO_TOKEN = -1


class CudaInputs:
    """Buffers for steps of at most `num_rows` requests and `max_tokens` tokens, padding included."""

    def __init__(self, tables: SlotTables, block_size: int, num_rows: int, max_tokens: int) -> None:
        self.tables = tables
        self._block_size, self._max_len = block_size, tables.shape.max_len
        self._requests = state.RequestTables(tables.tokens.token_ids, tables.tokens.num_tokens, tables.num_computed)
        self.num_rows, self.max_tokens = num_rows, max(max_tokens, num_rows)
        self._index = np.arange(num_rows + 1, dtype=np.int32)

        def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=tables.device)

        # What the host sends: first tokens, slots, slots that sample, and which token their logits come from.
        self.sent = buffer(4 * num_rows + 1)
        self._query_start = self.sent[: num_rows + 1]
        self._slots, self.sample_slots, self.logit_index = self.sent[num_rows + 1 :].view(3, num_rows)
        self._input_ids, self._positions = buffer(self.max_tokens), buffer(self.max_tokens)
        self._seq_lens = buffer(num_rows)
        self._groups = [
            (table, buffer(num_rows, tables.shape.max_blocks), buffer(self.max_tokens, dtype=torch.int64))
            for table in tables.block_tables
        ]

    def stage(self, plan: StepPlan, host: NDArray[np.int32]) -> StepRows:
        """Fill `host` with what is to be copied to `sent`, padded for a step of any shape.

        Raises:
            ValueError: the step is larger than the buffers.
        """
        num_reqs, num_rows = plan.num_reqs, self.num_rows
        if num_reqs > num_rows:
            raise ValueError(f"{num_reqs} requests are more than the buffers hold")
        query_start, (slots, sample_slots, logit_index) = host[: num_rows + 1], host[num_rows + 1 :].reshape(3, -1)
        slots[:num_reqs] = plan.slots
        slots[num_reqs:] = 0
        if plan.num_decodes == num_reqs:
            query_start[: num_reqs + 1] = self._index[: num_reqs + 1]
            sample_rows, chosen = self._index[:num_reqs].astype(np.int64), plan.slots
        else:
            query_start[0] = 0
            np.cumsum(plan.num_scheduled, out=query_start[1 : num_reqs + 1])
            sample_rows = np.flatnonzero(plan.samples)
            chosen = plan.slots[sample_rows]
            last = last_tokens(query_start, sample_rows)
            logit_index[: len(last)] = last
            logit_index[len(last) :] = _NO_TOKEN
        num_tokens = int(query_start[num_reqs])
        if num_tokens > self.max_tokens:
            raise ValueError(f"{num_tokens} tokens are more than the buffers hold")
        query_start[num_reqs + 1 :] = num_tokens
        sample_slots[: len(chosen)] = chosen
        sample_slots[len(chosen) :] = _NO_SLOT
        max_tokens = int((plan.num_computed + plan.num_scheduled).max())
        return StepRows(query_start[: num_reqs + 1].copy(), sample_rows, chosen, max_tokens)

    def clear(self) -> None:
        """As if a step without any request had been sent: the kernels of every shape can run."""
        self.sent.zero_()
        self.sample_slots.fill_(_NO_SLOT)
        self.logit_index.fill_(_NO_TOKEN)

    def expand(self, shape: StepShape) -> ForwardBatch:
        """Enqueue the kernels that fill the batch from what was sent."""
        num_rows, num_tokens = shape.num_rows, shape.num_tokens
        rows = state.StepRows(self._slots[:num_rows], self._query_start[: num_rows + 1], shape.max_query_len)
        tokens = state.StepTokens(self._input_ids[:num_tokens], self._positions[:num_tokens], self._seq_lens[:num_rows])
        groups = [
            state.GroupBlocks(table, step_table[:num_rows], slot_mapping[:num_tokens])
            for table, step_table, slot_mapping in self._groups
        ]
        state.expand(self._requests, rows, self._block_size, tokens, groups)
        return ForwardBatch(
            input_ids=tokens.input_ids,
            positions=tokens.positions,
            query_start_loc=rows.query_start_loc,
            seq_lens=tokens.seq_lens,
            groups=[KVGroupBatch(group.step_table, group.slots) for group in groups],
            num_reqs=num_rows,
            num_tokens=num_tokens,
            num_decodes=shape.num_decodes,
            max_query_len=shape.max_query_len,
            max_seq_len=self._max_len,
        )

    def advance(self, token_ids: torch.Tensor) -> None:
        """Enqueue: count the step's tokens as computed, and append `token_ids` int32 [n] to the first `n` requests
        that sample."""
        rows = state.StepRows(self._slots, self._query_start, max_query_len=1)
        state.advance(self._requests, rows, self.sample_slots[: len(token_ids)], token_ids)
