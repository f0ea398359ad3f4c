"""Tokens that are not allowed get minus infinity, by bits that the host has made for some rows of the step.

The bits lie in buffers of their own, so that a graph can hold the kernel: which rows have some, and which ones, it
looks up when it runs.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tokenmill_kernels.gpu.launch import launch_options, let_dependents_start, wait_for_inputs

_WORDS = 64
"""Of 32 tokens, for one program."""


@dataclass(slots=True, frozen=True)
class MaskBuffers:
    """What the kernel looks up."""

    entries: torch.Tensor
    """int32 [max_rows]: the row of `bits` that belongs to each row of the logits; -1: it may sample every token."""
    bits: torch.Tensor
    """int32 [max_rows, ceil(vocab_size / 32)]: bit `i % 32` of word `i // 32` is set if token `i` is allowed."""


def allocate_masks(max_rows: int, vocab_size: int, device: torch.device) -> MaskBuffers:
    """For steps of at most `max_rows` rows, none of which has bits yet."""
    return MaskBuffers(
        entries=torch.full((max_rows,), -1, dtype=torch.int32, device=device),
        bits=torch.zeros((max_rows, -(-vocab_size // 32)), dtype=torch.int32, device=device),
    )


@triton.jit
def _masks_kernel(
    logits_ptr, entries_ptr, bits_ptr, row_stride, vocab_size, num_words, num_entries, pdl: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """`block` words of row program_id(0). Rows past the entries pad the batch of a graph: they have no bits."""
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    row = tl.program_id(0)
    entry = tl.load(entries_ptr + row, mask=row < num_entries, other=-1).to(tl.int64)
    if entry >= 0:
        words = tl.program_id(1) * block + tl.arange(0, block)
        bits = tl.load(bits_ptr + entry * num_words + words, mask=words < num_words, other=0)
        places = tl.arange(0, 32)
        forbidden = ((bits[:, None] >> places[None, :]) & 1) == 0
        tokens = words[:, None] * 32 + places[None, :]
        out = logits_ptr + row.to(tl.int64) * row_stride + tokens
        tl.store(out, tl.full((block, 32), float("-inf"), tl.float32), mask=forbidden & (tokens < vocab_size))


def apply_masks(logits: torch.Tensor, buffers: MaskBuffers) -> None:
    """Change `logits` float32 [R, V] with contiguous rows in place: row r by entry r of the buffers, if any."""
    num_rows, vocab_size = logits.shape
    num_words = buffers.bits.shape[1]
    _masks_kernel[(num_rows, triton.cdiv(num_words, _WORDS))](
        logits, buffers.entries, buffers.bits, logits.stride(0), vocab_size, num_words, len(buffers.entries),
        block=_WORDS, num_warps=4, **launch_options(logits.device),
    )  # fmt: skip
