"""Repetition, frequency and presence penalties, counted from the tokens of each row.

A few workers, one program each, take the rows in turn. A worker has a counter for every token of the vocabulary, all
zero between rows: it counts the tokens of a row, then goes through them again and takes each counter back to zero. The
first to find it set changes the logit. So the work grows with the tokens of a row and not with the vocabulary, and the
counters do not grow with the batch.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from tokenmill_kernels import sampling_columns as columns
from tokenmill_kernels.gpu.launch import launch_options, let_dependents_start, wait_for_inputs
from tokenmill_kernels.gpu.sampling import SamplingTables

MAX_WORKERS = 64

_BLOCK = 1024
_NUM_FLOATS = tl.constexpr(columns.NUM_FLOATS)
_REPETITION = tl.constexpr(columns.REPETITION)
_FREQUENCY = tl.constexpr(columns.FREQUENCY)
_PRESENCE = tl.constexpr(columns.PRESENCE)


@triton.jit
def _penalize_row(
    row_ptr, counters_ptr, token_ids_ptr, num_tokens, num_prompt, repetition, frequency, presence, block: tl.constexpr
):  # fmt: skip
    """Change the logits of one row. Counters are 1 for a token of the prompt, and 2 for each time in the output."""
    lanes = tl.arange(0, block)
    # Without a repetition penalty only the output counts.
    begin = tl.where(repetition == 1.0, num_prompt, 0)
    for start in range(begin, num_tokens, block):
        places = start + lanes
        inside = places < num_tokens
        ids = tl.load(token_ids_ptr + places, mask=inside, other=0)
        in_output = places >= num_prompt
        tl.atomic_or(counters_ptr + ids, 1, mask=inside & (in_output == 0), sem="relaxed")
        tl.atomic_add(counters_ptr + ids, 2, mask=inside & in_output, sem="relaxed")
    tl.debug_barrier()
    for start in range(begin, num_tokens, block):
        inside = start + lanes < num_tokens
        ids = tl.load(token_ids_ptr + start + lanes, mask=inside, other=0)
        counters = tl.atomic_xchg(counters_ptr + ids, 0, mask=inside, sem="relaxed")
        first = inside & (counters > 0)
        logits = tl.load(row_ptr + ids, mask=first, other=0.0)
        divided = tl.div_rn(logits, tl.full((block,), 1.0, dtype=tl.float32) * repetition)
        logits = tl.where(logits > 0, divided, logits * repetition)
        count = counters // 2
        logits -= count.to(tl.float32) * frequency
        logits -= tl.where(count > 0, presence, 0.0)
        tl.store(row_ptr + ids, logits, mask=first)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["slots_ptr", "num_rows"])
def _penalties_kernel(
    logits_ptr, counters_ptr, slots_ptr, floats_ptr, token_ids_ptr, num_tokens_ptr, num_prompt_ptr, row_stride,
    token_stride, vocab_size, num_rows, pdl: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Rows program_id(0), program_id(0) + workers, ..."""
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    counters_ptr += tl.program_id(0).to(tl.int64) * vocab_size
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        slot = tl.load(slots_ptr + row).to(tl.int64)
        if slot >= 0:
            repetition = tl.load(floats_ptr + slot * _NUM_FLOATS + _REPETITION)
            frequency = tl.load(floats_ptr + slot * _NUM_FLOATS + _FREQUENCY)
            presence = tl.load(floats_ptr + slot * _NUM_FLOATS + _PRESENCE)
            if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
                _penalize_row(
                    logits_ptr + tl.cast(row, tl.int64) * row_stride, counters_ptr, token_ids_ptr + slot * token_stride,
                    tl.load(num_tokens_ptr + slot), tl.load(num_prompt_ptr + slot), repetition, frequency, presence,
                    block,
                )  # fmt: skip


def allocate_counters(max_rows: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    """int32 [workers, vocab_size] zeros, for any number of calls on one stream."""
    return torch.zeros((min(max_rows, MAX_WORKERS), vocab_size), dtype=torch.int32, device=device)


def apply_penalties(logits: torch.Tensor, slots: torch.Tensor, tables: SamplingTables, counters: torch.Tensor) -> None:
    """Change `logits` float32 [R, V] with contiguous rows in place, by the penalties of `slots` int32 [R]; rows of a
    negative slot stay. The arithmetic is that of separate float32 operators, to the bit.

    `counters` are those of `allocate_counters`.
    """
    num_rows = logits.shape[0]
    _penalties_kernel[(min(num_rows, counters.shape[0]),)](
        logits, counters, slots, tables.floats, tables.token_ids, tables.num_tokens, tables.num_prompt,
        logits.stride(0), tables.token_ids.stride(0), counters.shape[1], num_rows, block=_BLOCK, num_warps=8,
        **(launch_options(logits.device) | {"enable_fp_fusion": False}),
    )  # fmt: skip
