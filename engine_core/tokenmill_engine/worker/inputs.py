"""From a step plan to the tensors of a forward pass."""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill_engine.attention.batch import ForwardBatch, KVGroupBatch
from tokenmill_engine.outputs import MissingImages, SampledTokens, StepPlan
from tokenmill_engine.worker.encoder_time import EncoderTime
from tokenmill_engine.worker.slots import SlotTables


@dataclass(slots=True)
class MissingRows:
    """Images that a step should look at and cannot."""

    rows: set[int] = field(default_factory=set)
    """Of the plan: what they give is of no use."""
    entries: set[int] = field(default_factory=set)
    """As in `StepResult.lost_entries`."""

    def add(self, row: int, entry: int) -> None:
        self.rows.add(row)
        self.entries.add(entry)

    def told(self, step: int) -> MissingImages:
        """The same for who sees the results of the step."""
        return MissingImages(step, tuple(sorted(self.rows)), tuple(sorted(self.entries)))


@dataclass(slots=True)
class StepRows:
    """What the host knows of a prepared step. Rows are those of the plan."""

    query_start: NDArray[np.int32]
    """[num_reqs + 1]: first token of each row."""
    sample_rows: NDArray[np.int64]
    """[num_samples] rows that yield a token."""
    sample_slots: NDArray[np.int32]
    """[num_samples] their slots."""
    max_tokens: int
    """No row has more known tokens than that."""
    missing: MissingRows | None = None
    encoder_time: EncoderTime | None = None
    """Of a step that encodes media."""


@dataclass(slots=True)
class StepInputs:
    """One step on the CPU, prepared."""

    rows: StepRows
    batch: ForwardBatch
    logit_index: torch.Tensor | None
    """int32, ascending: the tokens whose hidden states decide, one for each sampling row; None if all do, in order.
    At least one, even if no row samples."""


def last_tokens(query_start: NDArray[np.int32], sample_rows: NDArray[np.int64]) -> NDArray[np.int32]:
    """The last token of each sampling row; one token of no interest if none samples."""
    return query_start[sample_rows + 1] - 1 if len(sample_rows) else np.zeros(1, np.int32)


class CpuPreparer:
    """Vectorized over the shared memory of the tables."""

    def __init__(self, tables: SlotTables, block_size: int) -> None:
        self._block_size = block_size
        self._token_ids: NDArray[np.int32] = tables.tokens.token_ids.numpy()
        self._num_tokens: NDArray[np.int32] = tables.tokens.num_tokens.numpy()
        self._num_computed: NDArray[np.int32] = tables.num_computed.numpy()
        self._block_tables: list[NDArray[np.int32]] = [table.numpy() for table in tables.block_tables]
        self._index = np.arange(max(tables.shape.num_slots, 1) + 1, dtype=np.int32)

    def prepare(self, plan: StepPlan) -> StepInputs:
        """The inputs of `plan`, whose starts and appends are in the slots already."""
        slots, counts, num_reqs = plan.slots, plan.num_scheduled, plan.num_reqs
        computed = self._num_computed[slots]
        seq_lens = computed + counts
        max_seq_len = int(seq_lens.max())
        if plan.num_decodes == num_reqs:
            query_start = self._index[: num_reqs + 1]
            positions, token_slots = computed, slots
            sample_rows, sample_slots, logit_index = self._index[:num_reqs].astype(np.int64), slots, None
            max_query_len = 1
        else:
            query_start = np.zeros(num_reqs + 1, np.int32)
            np.cumsum(counts, out=query_start[1:])
            row_of_token = np.repeat(self._index[:num_reqs], counts)
            first_position = computed - query_start[:-1]
            positions = np.arange(query_start[-1], dtype=np.int32) + first_position[row_of_token]
            token_slots = slots[row_of_token]
            sample_rows = np.flatnonzero(plan.samples)
            sample_slots = slots[sample_rows]
            logit_index = torch.from_numpy(last_tokens(query_start, sample_rows))
            max_query_len = int(counts.max())
        batch = ForwardBatch(
            input_ids=torch.from_numpy(self._token_ids[token_slots, positions]),
            positions=torch.from_numpy(positions),
            query_start_loc=torch.from_numpy(query_start),
            seq_lens=torch.from_numpy(seq_lens),
            groups=self._groups(slots, token_slots, positions, max_seq_len),
            num_reqs=num_reqs,
            num_tokens=len(positions),
            num_decodes=plan.num_decodes,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )
        return StepInputs(StepRows(query_start, sample_rows, sample_slots, max_seq_len), batch, logit_index)

    def _groups(
        self, slots: NDArray[np.int32], token_slots: NDArray[np.int32], positions: NDArray[np.int32], max_seq_len: int
    ) -> list[KVGroupBatch]:
        size = self._block_size
        block, offset = np.divmod(positions, size)
        num_blocks = -(-max_seq_len // size)
        return [
            KVGroupBatch(
                block_tables=torch.from_numpy(table[slots, :num_blocks]),
                slot_mapping=torch.from_numpy(table[token_slots, block].astype(np.int64) * size + offset),
            )
            for table in self._block_tables
        ]

    def take_in(self, sampled: SampledTokens | None) -> None:
        """Write tokens that another worker sampled."""
        if sampled is not None:
            self._token_ids[sampled.slots, sampled.positions] = sampled.token_ids
            self._num_tokens[sampled.slots] = sampled.positions + 1

    def count(self, plan: StepPlan) -> None:
        """The plan's tokens are computed."""
        self._num_computed[plan.slots] += plan.num_scheduled

    def advance(self, plan: StepPlan, rows: StepRows, token_ids: torch.Tensor) -> None:
        """Count the plan's tokens as computed and append the sampled ones, int32 [num_samples]."""
        self.count(plan)
        slots = rows.sample_slots
        # A request that is over on the host may run one step ahead: its row never grows past the table.
        end = np.minimum(self._num_tokens[slots], self._token_ids.shape[1] - 1)
        self._token_ids[slots, end] = np.maximum(token_ids.numpy(), 0)
        self._num_tokens[slots] = end + 1
