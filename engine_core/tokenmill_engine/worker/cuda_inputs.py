"""Step inputs on a GPU: the host sends one small array, kernels expand it from the tables in device memory.

All tensors of a batch are views of buffers that live as long as the worker, so a graph captured on them can be
replayed for later steps.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill_engine.attention.batch import ForwardBatch, KVGroupBatch
from tokenmill_engine.outputs import StepPlan
from tokenmill_engine.worker.inputs import StepInputs, last_tokens
from tokenmill_engine.worker.slots import SlotTables
from tokenmill_kernels.gpu import state


class CudaPreparer:
    """Steps of at most `max_tokens` tokens. Batches in which every request has one token are padded to the next of
    `decode_sizes` (ascending, possibly empty)."""

    def __init__(self, tables: SlotTables, block_size: int, max_tokens: int, decode_sizes: Sequence[int]) -> None:
        self._tables = tables
        self._block_size = block_size
        self._decode_sizes = np.array(decode_sizes, np.int64)
        self._requests = state.RequestTables(tables.tokens.token_ids, tables.tokens.num_tokens, tables.num_computed)
        num_rows = self._num_rows = max(tables.shape.num_slots, *decode_sizes, 1)

        max_tokens = max(max_tokens, num_rows)

        def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=tables.device)

        # What the host sends: first tokens, slots, slots that sample, and which token their logits come from.
        self._sent = buffer(4 * num_rows + 1)
        self._query_start = self._sent[: num_rows + 1]
        self._slots, self._sample_slots, self._logit_index = self._sent[num_rows + 1 :].view(3, num_rows)
        self._input_ids, self._positions, self._seq_lens = buffer(max_tokens), buffer(max_tokens), buffer(num_rows)
        self._groups = [
            (buffer(num_rows, tables.shape.max_blocks), buffer(max_tokens, dtype=torch.int64))
            for _ in tables.block_tables
        ]

    def prepare(self, plan: StepPlan) -> StepInputs:
        """Raises ValueError if the step is larger than the buffers."""
        num_reqs, only_decodes = plan.num_reqs, plan.num_decodes == plan.num_reqs
        num_rows = self._padded(num_reqs) if only_decodes else num_reqs
        query_start = np.zeros(num_rows + 1, np.int32)
        np.cumsum(plan.num_scheduled, out=query_start[1 : num_reqs + 1])
        query_start[num_reqs + 1 :] = query_start[num_reqs]
        num_tokens = num_rows if only_decodes else int(query_start[-1])
        if num_tokens > len(self._input_ids) or num_rows > self._num_rows:
            raise ValueError(f"{num_tokens} tokens of {num_rows} requests are more than the buffers hold")
        sample_rows = np.flatnonzero(plan.samples)
        sample_slots = plan.slots[sample_rows]
        logit_index = last_tokens(query_start, sample_rows)
        self._send(query_start, plan.slots, sample_slots, logit_index)

        max_query_len = 1 if only_decodes else int(plan.num_scheduled.max())
        rows = self._step_rows(num_rows, max_query_len)
        tokens = state.StepTokens(self._input_ids[:num_tokens], self._positions[:num_tokens], self._seq_lens[:num_rows])
        state.expand_tokens(self._requests, rows, tokens)
        groups = []
        for table, (step_table, slot_mapping) in zip(self._tables.block_tables, self._groups, strict=True):
            out = (step_table[:num_rows], slot_mapping[:num_tokens])
            state.expand_blocks(table, self._requests.num_computed, rows, self._block_size, out)
            groups.append(KVGroupBatch(*out))
        batch = ForwardBatch(
            input_ids=tokens.input_ids,
            positions=tokens.positions,
            query_start_loc=rows.query_start_loc,
            seq_lens=tokens.seq_lens,
            groups=groups,
            num_reqs=num_rows,
            num_tokens=num_tokens,
            num_decodes=num_rows if only_decodes else plan.num_decodes,
            max_query_len=max_query_len,
            max_seq_len=self._tables.shape.max_len,
        )
        return StepInputs(
            batch=batch,
            query_start=query_start,
            sample_rows=sample_rows,
            sample_slots=sample_slots,
            logit_index=None if only_decodes else self._logit_index[: len(logit_index)],
            max_tokens=int((plan.num_computed + plan.num_scheduled).max()),
        )

    def advance(self, plan: StepPlan, inputs: StepInputs, token_ids: torch.Tensor) -> None:
        rows = self._step_rows(plan.num_reqs, inputs.batch.max_query_len)
        state.advance(self._requests, rows, self._sample_slots[: len(inputs.sample_rows)], token_ids)

    def _padded(self, num_reqs: int) -> int:
        """The smallest graph size that holds `num_reqs` requests, or just as many."""
        index = int(np.searchsorted(self._decode_sizes, num_reqs))
        return int(self._decode_sizes[index]) if index < len(self._decode_sizes) else num_reqs

    def _step_rows(self, num_rows: int, max_query_len: int) -> state.StepRows:
        return state.StepRows(self._slots[:num_rows], self._query_start[: num_rows + 1], max_query_len)

    def _send(self, *parts: NDArray[np.int32]) -> None:
        """One copy of all parts, each to its place in the buffer."""
        staged = torch.empty(self._sent.shape, dtype=torch.int32, pin_memory=self._sent.is_cuda)
        host = staged.numpy()
        offset = 0
        for part, size in zip(parts, (self._num_rows + 1, *[self._num_rows] * 3), strict=True):
            host[offset : offset + len(part)] = part
            host[offset + len(part) : offset + size] = 0
            offset += size
        # The allocator keeps the pinned block until the copy is done.
        self._sent.copy_(staged, non_blocking=True)
