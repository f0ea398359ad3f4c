"""Index of the largest logit of each row: pieces of all rows side by side, then one program per row over the pieces."""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from tokenmill_kernels.gpu.launch import launch_options, let_dependents_start, wait_for_inputs

PIECE = 4096
"""Logits of one program."""


@triton.jit
def first_largest(values, indices):
    """(largest of `values`, lowest of `indices` where it stands). A NaN counts as infinity, which no logit may be."""
    values = tl.where(values != values, float("inf"), values)
    largest = tl.max(values, axis=0)
    return largest, tl.min(tl.where(values == largest, indices, 0x7FFFFFFF), axis=0)


@triton.jit
def _pieces_kernel(
    values_ptr, indices_ptr, logits_ptr, row_stride, vocab_size, pdl: tl.constexpr, piece: tl.constexpr
):  # fmt: skip
    """Piece program_id(0) of row program_id(1)."""
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    row = tl.program_id(1)
    tokens = tl.program_id(0) * piece + tl.arange(0, piece)
    logits = tl.load(logits_ptr + row.to(tl.int64) * row_stride + tokens, mask=tokens < vocab_size, other=float("-inf"))
    value, index = first_largest(logits, tokens)
    target = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(values_ptr + target, value)
    tl.store(indices_ptr + target, index)


@triton.jit(do_not_specialize=["first"])
def _reduce_kernel(
    out_ptr, values_ptr, indices_ptr, num_pieces, first, scored: tl.constexpr, pdl: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """Row program_id(0): the index, counted from `first`; when `scored`, as the second of two numbers."""
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    row = tl.program_id(0)
    pieces = tl.arange(0, block)
    inside = pieces < num_pieces
    values = tl.load(values_ptr + row * num_pieces + pieces, mask=inside, other=float("-inf"))
    value, index = first_largest(values, tl.load(indices_ptr + row * num_pieces + pieces, mask=inside, other=0))
    # A finite number: infinities fail one of the two, a NaN has become one.
    index = tl.where((value > float("-inf")) & (value < float("inf")), index + first, -1)
    if scored:
        tl.store(out_ptr + row * 2, value)
        tl.store(out_ptr + row * 2 + 1, index.to(tl.float32))
    else:
        tl.store(out_ptr + row, index)


def reduce_pieces(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The index that belongs to the largest of each row of `values` float32 [R, P], contiguous as `indices` int32
    [R, P]; of equal values the lowest index. int32 [R], -1 where the largest is no finite number or one is a NaN."""
    out = torch.empty(values.shape[0], dtype=torch.int32, device=values.device)
    _reduce(out, values, indices, 0, scored=False)
    return out


def best_of_pieces(values: torch.Tensor, indices: torch.Tensor, first: int) -> torch.Tensor:
    """As `reduce_pieces`, with the value in front: float32 [R, 2]. Indices that are not -1 are counted from `first`."""
    out = torch.empty((values.shape[0], 2), dtype=torch.float32, device=values.device)
    _reduce(out, values, indices, first, scored=True)
    return out


def _reduce(out: torch.Tensor, values: torch.Tensor, indices: torch.Tensor, first: int, scored: bool) -> None:
    num_rows, num_pieces = values.shape
    block = triton.next_power_of_2(num_pieces)
    _reduce_kernel[(num_rows,)](
        out, values, indices, num_pieces, first, scored=scored, block=block, num_warps=min(max(block // 128, 1), 8),
        **launch_options(values.device),
    )  # fmt: skip


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """First largest entry of each row of `logits` float32 [R, V] with contiguous rows. int32 [R], -1 where the largest
    is no finite number or the row has a NaN."""
    return reduce_pieces(*logit_pieces(logits))


def logit_pieces(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `reduce_pieces` takes, of `logits` float32 [R, V] with contiguous rows."""
    num_rows, vocab_size = logits.shape
    num_pieces = triton.cdiv(vocab_size, PIECE)
    values = torch.empty((num_rows, num_pieces), dtype=torch.float32, device=logits.device)
    indices = torch.empty((num_rows, num_pieces), dtype=torch.int32, device=logits.device)
    _pieces_kernel[(num_pieces, num_rows)](
        values, indices, logits, logits.stride(0), vocab_size, piece=PIECE, num_warps=4,
        **launch_options(logits.device),
    )  # fmt: skip
    return values, indices
