"""Request state that lives on the device: expansion into the inputs of a step, and its update after the step.

Persistent tables have one row per slot. A step names its requests by slot and gives a prefix sum of their new tokens;
nothing else crosses from the host. Grids follow from padded sizes, so every launch can be captured in a CUDA graph.
Padding: requests with no new token (any slot), tokens that no request owns, sampled tokens of slot -1.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tokenmill_kernels.gpu.exchange import Report, write_report
from tokenmill_kernels.gpu.launch import launch_options, let_dependents_start, wait_for_inputs

_BLOCK = 512
_MAX_PIECES = 8


@dataclass(frozen=True, slots=True)
class RequestTables:
    """Tokens and counts by slot, all int32 on the device."""

    token_ids: torch.Tensor
    """[num_slots, max_len]"""
    num_tokens: torch.Tensor
    """[num_slots]: known tokens."""
    num_computed: torch.Tensor
    """[num_slots]: tokens whose keys and values are in the cache."""
    position_deltas: torch.Tensor | None = None
    """[num_slots]: what to add to the index of a token for its position; None if that is 0 for all."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """The requests of a step."""

    slots: torch.Tensor
    """int32 [R]"""
    query_start_loc: torch.Tensor
    """int32 [R + 1]: prefix sum of the new tokens of each request."""
    max_query_len: int
    """Upper bound on the new tokens of a request."""

    def grid(self) -> tuple[int, int]:
        """One row of programs per request and one for the padding, in pieces for long chunks."""
        pieces = min(max(triton.cdiv(self.max_query_len, _BLOCK), 1), _MAX_PIECES)
        return self.slots.shape[0] + 1, pieces


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Output of `expand`, all int32."""

    input_ids: torch.Tensor
    """[T]; 0 in padding."""
    positions: torch.Tensor
    """[T], index in the request plus its delta; 0 in padding."""
    seq_lens: torch.Tensor
    """[R]: computed tokens after the step; 0 for padding."""


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Blocks of one KV group: `table` by slot, the other two are outputs of `expand`."""

    table: torch.Tensor
    """int32 [num_slots, max_blocks]"""
    step_table: torch.Tensor
    """int32 [R, max_blocks]: block tables of the step; entries past a request's blocks keep what they held."""
    slots: torch.Tensor
    """int64 [T]: where the new keys and values go, block * block_size + offset; -1 in padding."""


@triton.jit
def _expand_request(
    input_ids_ptr, positions_ptr, seq_lens_ptr, out_table_ptr, slot_mapping_ptr, slot_tokens_ptr, slot_table_ptr, row,
    start, count, computed, delta, out_stride, block_size: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One request: its block table and the slots of its new tokens; those tokens, their positions (`delta` past their
    indexes) and its length too, unless `input_ids_ptr` is None."""
    lanes = tl.program_id(1) * block + tl.arange(0, block)
    step = tl.num_programs(1) * block
    if input_ids_ptr is not None:
        tl.store(seq_lens_ptr + row, computed + count, mask=tl.program_id(1) == 0)
    for done in range(0, count, step):
        tokens = done + lanes
        inside = tokens < count
        positions = computed + tokens
        if input_ids_ptr is not None:
            token_ids = tl.load(slot_tokens_ptr + positions, mask=inside, other=0)
            tl.store(input_ids_ptr + start + tokens, token_ids, mask=inside)
            tl.store(positions_ptr + start + tokens, positions + delta, mask=inside)
        blocks = tl.load(slot_table_ptr + positions // block_size, mask=inside, other=0).to(tl.int64)
        tl.store(slot_mapping_ptr + start + tokens, blocks * block_size + positions % block_size, mask=inside)
    num_blocks = tl.cdiv(computed + count, block_size)
    for done in range(0, num_blocks, step):
        columns = done + lanes
        blocks = tl.load(slot_table_ptr + columns, mask=columns < num_blocks, other=0)
        tl.store(out_table_ptr + row.to(tl.int64) * out_stride + columns, blocks, mask=columns < num_blocks)


@triton.jit(do_not_specialize=["num_requests", "num_tokens", "out_stride"])
def _expand_kernel(
    input_ids_ptr, positions_ptr, seq_lens_ptr, out_table_ptr, slot_mapping_ptr, slots_ptr, query_start_loc_ptr,
    token_ids_ptr, num_computed_ptr, deltas_ptr, table_ptr, num_requests, num_tokens, token_stride, table_stride,
    out_stride,
    block_size: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Row program_id(0) of the step; the row after the last is the padding. `input_ids_ptr` is None if only blocks
    are wanted."""
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    row = tl.program_id(0)
    if row < num_requests:
        start = tl.load(query_start_loc_ptr + row)
        count = tl.load(query_start_loc_ptr + row + 1) - start
        slot = tl.load(slots_ptr + row).to(tl.int64)
        # Padding may name any slot, even one that does not exist.
        computed = tl.load(num_computed_ptr + slot, mask=count > 0, other=0)
        delta = 0 if deltas_ptr is None else tl.load(deltas_ptr + slot, mask=count > 0, other=0)
        _expand_request(
            input_ids_ptr, positions_ptr, seq_lens_ptr, out_table_ptr, slot_mapping_ptr,
            token_ids_ptr + slot * token_stride, table_ptr + slot * table_stride, row, start, count, computed, delta,
            out_stride, block_size, block,
        )  # fmt: skip
    else:
        lanes = tl.program_id(1) * block + tl.arange(0, block)
        step = tl.num_programs(1) * block
        for done in range(tl.load(query_start_loc_ptr + num_requests), num_tokens, step):
            inside = done + lanes < num_tokens
            if input_ids_ptr is not None:
                tl.store(input_ids_ptr + done + lanes, tl.zeros((block,), dtype=tl.int32), mask=inside)
                tl.store(positions_ptr + done + lanes, tl.zeros((block,), dtype=tl.int32), mask=inside)
            tl.store(slot_mapping_ptr + done + lanes, tl.full((block,), -1, dtype=tl.int64), mask=inside)


def expand(
    tables: RequestTables, rows: StepRows, block_size: int, tokens: StepTokens, groups: Sequence[GroupBlocks]
) -> None:
    """Fills `tokens` with the next tokens of each request, those after its computed ones, and the outputs of every KV
    group (at least one). One launch for each group; the first also does the tokens."""
    to_fill: tuple[torch.Tensor | None, ...] = (tokens.input_ids, tokens.positions, tokens.seq_lens)
    deltas = tables.position_deltas
    for group in groups:
        _expand_kernel[rows.grid()](
            *to_fill, group.step_table, group.slots, rows.slots, rows.query_start_loc, tables.token_ids,
            tables.num_computed, deltas, group.table, rows.slots.shape[0], group.slots.shape[0],
            tables.token_ids.stride(0), group.table.stride(0), group.step_table.stride(0),
            block_size=block_size, block=_BLOCK, num_warps=4, **launch_options(rows.slots.device),
        )  # fmt: skip
        to_fill, deltas = (None, None, None), None


@triton.jit(do_not_specialize=["sample_slots_ptr", "sampled_ptr", "num_requests", "num_samples", "max_len"])
def _advance_kernel(
    token_ids_ptr, num_tokens_ptr, num_computed_ptr, slots_ptr, query_start_loc_ptr, sample_slots_ptr, sampled_ptr,
    num_requests, num_samples, token_stride, max_len, report_ptr, turn_ptr, report_stride, num_entries: tl.constexpr,
    block: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Each lane advances one request, appends one sampled token and reports it, unless `report_ptr` is None. Of a step
    that samples nothing the pointers of samples are 0, which is aligned as others are not: one variant serves both."""
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    lanes = tl.program_id(0) * block + tl.arange(0, block)
    inside = lanes < num_requests
    start = tl.load(query_start_loc_ptr + lanes, mask=inside, other=0)
    count = tl.load(query_start_loc_ptr + lanes + 1, mask=inside, other=0) - start
    slots = tl.load(slots_ptr + lanes, mask=inside, other=0)
    moved = inside & (count > 0)
    computed = tl.load(num_computed_ptr + slots, mask=moved, other=0)
    tl.store(num_computed_ptr + slots, computed + count, mask=moved)

    sample_slots = tl.load(sample_slots_ptr + lanes, mask=lanes < num_samples, other=-1).to(tl.int64)
    kept = sample_slots >= 0
    token_ids = tl.load(sampled_ptr + lanes, mask=lanes < num_samples, other=0).to(tl.int32)
    if report_ptr is not None:
        write_report(report_ptr, turn_ptr, report_stride, token_ids, lanes, num_samples, num_entries)
    ends = tl.minimum(tl.load(num_tokens_ptr + sample_slots, mask=kept, other=0), max_len - 1)
    tl.store(token_ids_ptr + sample_slots * token_stride + ends, tl.maximum(token_ids, 0), mask=kept)
    tl.store(num_tokens_ptr + sample_slots, ends + 1, mask=kept)


def advance(
    tables: RequestTables,
    rows: StepRows,
    sample_slots: torch.Tensor,
    sampled: torch.Tensor,
    report: Report | None = None,
) -> None:
    """After a step: counts its tokens as computed and appends `sampled` [S] (int32 or int64; negative counts as 0)
    to the tokens of `sample_slots` int32 [S], -1 for none. The last column takes what goes past a full row. `report`
    gets the tokens as they are."""
    block = 256
    num_requests, num_samples = rows.slots.shape[0], sample_slots.shape[0]
    ring, turn = (None, None) if report is None else (report.ring, report.turn)
    _advance_kernel[(triton.cdiv(max(num_requests, num_samples), block),)](
        tables.token_ids, tables.num_tokens, tables.num_computed, rows.slots, rows.query_start_loc, sample_slots,
        sampled, num_requests, num_samples, tables.token_ids.stride(0), tables.token_ids.shape[1],
        ring, turn, 0 if ring is None else ring.stride(0), num_entries=1 if ring is None else ring.shape[0],
        block=block, num_warps=4, **launch_options(sampled.device),
    )  # fmt: skip
