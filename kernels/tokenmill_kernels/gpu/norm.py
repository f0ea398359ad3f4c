"""RMS norm, alone and fused with the residual addition before it. One program normalises one row."""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from tokenmill_kernels.gpu.launch import COMPILE_OPTIONS


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, x_stride, residual_stride, out_stride, eps, width: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Row program_id(0): residual += x when there is a residual; out = x * rsqrt(mean(x^2) + eps) * weight."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < width
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    if residual_ptr is not None:
        residual_ptrs = residual_ptr + row * residual_stride + columns
        total = x.to(tl.float32) + tl.load(residual_ptrs, mask=inside, other=0.0).to(tl.float32)
        x = total.to(x.dtype)
        tl.store(residual_ptrs, x, mask=inside)
    wide = x.to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    tl.store(out_ptr + row * out_stride + columns, (wide * inverse_rms * weight).to(x.dtype), mask=inside)


def _launch(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    num_rows, width = x.shape
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(num_rows,)](
        x,
        residual,
        weight,
        out,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        eps,
        width=width,
        block=block,
        num_warps=min(max(block // 512, 1), 16),
        **COMPILE_OPTIONS,
    )
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight for x [T, N] with contiguous rows, weight [N] -> [T, N]; float32 inside."""
    return _launch(x, None, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(residual), residual) after residual += x, in place; x and residual [T, N] with contiguous rows."""
    return _launch(x, residual, weight, eps), residual
