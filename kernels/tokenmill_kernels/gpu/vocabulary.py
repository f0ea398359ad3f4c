"""What workers do that have the entries of a vocabulary between them: rows of the entries that are here, and the choice
among the best entries of all."""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from tokenmill_kernels.gpu.launch import launch_options, let_dependents_start, wait_for_inputs

_BLOCK = 2048


@triton.jit(do_not_specialize=["first", "num_here"])
def _rows_kernel(
    out_ptr, ids_ptr, weight_ptr, first, num_here, width, block: tl.constexpr, pdl: tl.constexpr
):  # fmt: skip
    """Columns [program_id(1) * block, ...) of row program_id(0): that of its entry, or zeros."""
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    entry = tl.load(ids_ptr + row).to(tl.int64) - first
    owned = columns < tl.where((entry >= 0) & (entry < num_here), width, 0)
    values = tl.load(weight_ptr + entry * width + columns, mask=owned, other=0.0)
    tl.store(out_ptr + row * width + columns, values, mask=columns < width)


@triton.jit
def _pick_kernel(out_ptr, pairs_ptr, num_members, block: tl.constexpr, pdl: tl.constexpr):
    """Row program_id(0)."""
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    row = tl.program_id(0)
    members = tl.arange(0, block)
    inside = members < num_members
    places = pairs_ptr + (row * num_members + members) * 2
    scores = tl.load(places, mask=inside, other=float("-inf"))
    entries = tl.load(places + 1, mask=inside, other=0.0)
    winner = tl.min(tl.where(scores == tl.max(scores, axis=0), members, block), axis=0)
    entry = tl.sum(tl.where(members == winner, entries, 0.0), axis=0)
    # A member without a best entry has a score that is no number.
    entry = tl.where(tl.min(entries, axis=0) < 0, -1.0, entry)
    tl.store(out_ptr + row, entry.to(tl.int32))


def embedding_part(ids: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
    """Rows `ids` [T] minus `first` of `weight` [V, N], contiguous; zeros for those that are not in it -> [T, N]."""
    num_rows, width = ids.shape[0], weight.shape[1]
    out = torch.empty((num_rows, width), dtype=weight.dtype, device=weight.device)
    block = min(triton.next_power_of_2(width), _BLOCK)
    _rows_kernel[(num_rows, triton.cdiv(width, block))](
        out, ids, weight, first, weight.shape[0], width, block=block, num_warps=min(max(block // 256, 1), 8),
        **launch_options(ids.device),
    )  # fmt: skip
    return out


def pick_best(pairs: torch.Tensor) -> torch.Tensor:
    """Of float32 [R, M, 2], contiguous, the scores and entries of M members: the entry with the largest score, that of
    the first such member. int32 [R]; -1 if one of the entries is -1."""
    num_rows, num_members, _ = pairs.shape
    out = torch.empty(num_rows, dtype=torch.int32, device=pairs.device)
    block = triton.next_power_of_2(num_members)
    _pick_kernel[(num_rows,)](out, pairs, num_members, block=block, num_warps=1, **launch_options(pairs.device))
    return out
