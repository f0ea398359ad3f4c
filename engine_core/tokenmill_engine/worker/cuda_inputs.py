"""Step inputs on a GPU: kernels take in what the host wrote and expand it from the tables in device memory.

All tensors of a batch are views of buffers that live as long as the worker, so a graph captured on them can be
replayed for later steps of the same shape.
"""

from collections.abc import Sequence

import torch

from tokenmill_engine.attention.batch import ForwardBatch, KVGroupBatch
from tokenmill_engine.outputs import StepPlan
from tokenmill_engine.worker.cuda_media import CudaMedia, MediaParts
from tokenmill_engine.worker.cuda_writes import ScatterWriter
from tokenmill_engine.worker.inputs import StepRows
from tokenmill_engine.worker.shapes import StepShape
from tokenmill_engine.worker.slots import SlotTables, Write
from tokenmill_engine.worker.step_ring import StepEntry, StepRing
from tokenmill_kernels.gpu import exchange, state


class CudaInputs:
    """Buffers for steps of at most `num_rows` requests and `max_tokens` tokens, padding included."""

    def __init__(self, tables: SlotTables, block_size: int, num_rows: int, max_tokens: int) -> None:
        self.tables = tables
        self._block_size, self._max_len = block_size, tables.shape.max_len
        self._requests = state.RequestTables(
            tables.tokens.token_ids, tables.tokens.num_tokens, tables.num_computed, tables.position_deltas
        )
        self.num_rows, self.max_tokens = num_rows, max(max_tokens, num_rows)
        self.ring = StepRing(num_rows, tables.device)
        self._report = exchange.Report(self.ring.received, self.ring.turn)
        self._writer = ScatterWriter(tables.buffer)

        def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=tables.device)

        # First tokens, slots, slots that sample, and which token their logits come from.
        self._received = buffer(4 * num_rows + 1)
        self._query_start = self._received[: num_rows + 1]
        self._slots, self.sample_slots, self.logit_index = self._received[num_rows + 1 :].view(3, num_rows)
        self._input_ids, self._positions = buffer(self.max_tokens), buffer(self.max_tokens)
        self._seq_lens = buffer(num_rows)
        self._groups = [
            (table, buffer(num_rows, tables.shape.max_blocks), buffer(self.max_tokens, dtype=torch.int64))
            for table in tables.block_tables
        ]

    def stage(self, plan: StepPlan, entry: StepEntry, more: Sequence[Write] = ()) -> StepRows:
        """Write the step into its entry, and `more` changes of the tables; what is too much for it is sent at once.

        Raises:
            ValueError: the step is larger than the buffers.
        """
        if plan.num_reqs > self.num_rows or (plan.num_decodes < plan.num_reqs and plan.num_tokens > self.max_tokens):
            raise ValueError(f"{plan.num_tokens} tokens of {plan.num_reqs} requests are more than the buffers hold")
        rows, rest = entry.write(plan, [*self.tables.changes(plan), *more])
        if rest:
            self.write_apart(rest)
        return rows

    def prepare_media(self, media: CudaMedia | None, plan: StepPlan, rows: StepRows) -> MediaParts | None:
        """Enqueue `CudaMedia.prepare` of the step that was staged. If that fails, the device takes in the entry all the
        same: later steps may be under way, and rely on what the requests of this one brought. With the blocks of who
        had their slots before they would write into what is others' now."""
        if media is None:
            return None
        try:
            return media.prepare(plan, rows)
        except Exception:
            self.receive()
            self.ring.count()
            raise

    def write_apart(self, changes: Sequence[Write]) -> None:
        """Enqueue: changes of the tables that an entry has no room for."""
        self._writer.write(changes)

    def receive(self) -> None:
        """Enqueue: take in the next entry, padded for a step of any shape."""
        exchange.receive(self._received, self.tables.buffer, self.ring.turn, self.ring.sent, self.ring.shape)

    def expand(self, shape: StepShape, media: MediaParts | None = None) -> ForwardBatch:
        """Enqueue the kernels that fill the batch from what was received, and add `media` to it."""
        num_rows, num_tokens = shape.num_rows, shape.num_tokens
        rows = state.StepRows(self._slots[:num_rows], self._query_start[: num_rows + 1], shape.max_query_len)
        tokens = state.StepTokens(self._input_ids[:num_tokens], self._positions[:num_tokens], self._seq_lens[:num_rows])
        groups = [
            state.GroupBlocks(table, step_table[:num_rows], slot_mapping[:num_tokens])
            for table, step_table, slot_mapping in self._groups
        ]
        state.expand(self._requests, rows, self._block_size, tokens, groups)
        batch = ForwardBatch(
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
            any_mix=shape.any_mix,
        )
        if media is not None:
            media.complete(batch)
        return batch

    def advance(self, token_ids: torch.Tensor) -> None:
        """Enqueue: count the step's tokens as computed, append `token_ids` int32 [n] to the first `n` requests that
        sample, and report them."""
        rows = state.StepRows(self._slots, self._query_start, max_query_len=1)
        state.advance(self._requests, rows, self.sample_slots[: len(token_ids)], token_ids, self._report)
