"""RMS norm, alone or behind a residual addition or an embedding lookup. One program normalises one row."""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from tokenmill_kernels.gpu.launch import launch_options, let_dependents_start, wait_for_inputs

_BYTES_PER_THREAD = 32


@triton.jit
def _rms_norm_kernel(
    out_ptr, sum_ptr, x_ptr, residual_ptr, rows_ptr, weight_ptr, x_stride, residual_stride, out_stride, sum_stride, eps,
    width: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Row program_id(0) of out, from that row of x or from row rows[program_id(0)]. A residual (or None) is added to
    it first; `sum_ptr` (or None) takes what is normalised."""
    columns = tl.arange(0, block)
    inside = None if width == block else columns < width
    weight = tl.load(weight_ptr + columns, mask=inside).to(tl.float32)
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    row = tl.program_id(0).to(tl.int64)
    source = row if rows_ptr is None else tl.load(rows_ptr + row).to(tl.int64)
    x = tl.load(x_ptr + source * x_stride + columns, mask=inside)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=inside)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    wide = x.to(tl.float32)
    squares = wide * wide if inside is None else tl.where(inside, wide * wide, 0.0)
    inverse_rms = tl.rsqrt(tl.sum(squares, axis=0) / width + eps)
    if sum_ptr is not None:
        tl.store(sum_ptr + row * sum_stride + columns, x, mask=inside)
    tl.store(out_ptr + row * out_stride + columns, (wide * inverse_rms * weight).to(x.dtype), mask=inside)


def _launch(
    out: torch.Tensor,
    total: torch.Tensor | None,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    rows: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
) -> None:
    num_rows, width = out.shape
    assert x.stride(1) == out.stride(1) == 1
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(num_rows,)](
        out,
        total,
        x,
        residual,
        rows,
        weight,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        0 if total is None else total.stride(0),
        eps,
        width=width,
        block=block,
        num_warps=min(max(block * x.element_size() // (32 * _BYTES_PER_THREAD), 1), 16),
        **launch_options(x.device),
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight for x [T, N] with contiguous rows, weight [N] -> [T, N]; float32 inside."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(out, None, x, None, None, weight, eps)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(residual), residual) after residual += x, in place; x and residual [T, N] with contiguous rows."""
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(out, residual, x, residual, None, weight, eps)
    return out, residual


def embed_rms_norm(
    ids: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(rows), rows) for the rows `ids` [T] of `table` [V, N], each [T, N]."""
    normed = torch.empty((ids.shape[0], table.shape[1]), dtype=table.dtype, device=table.device)
    rows = torch.empty_like(normed)
    _launch(normed, rows, table, None, ids, weight, eps)
    return normed, rows
