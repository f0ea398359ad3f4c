"""Activation of gated feed-forward layers."""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from tokenmill_kernels.gpu.launch import launch_options, let_dependents_start, wait_for_inputs

_BLOCK = 1024


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr, out_ptr, gate_up_stride, out_stride, width: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr
):  # fmt: skip
    """Columns [program_id(1) * block, ...) of row program_id(0)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = None if width % block == 0 else columns < width
    gate_ptrs = gate_up_ptr + row * gate_up_stride + columns
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    gate = tl.load(gate_ptrs, mask=inside)
    up = tl.load(gate_ptrs + width, mask=inside)
    wide = gate.to(tl.float32)
    product = wide * tl.sigmoid(wide) * up.to(tl.float32)
    tl.store(out_ptr + row * out_stride + columns, product.to(gate.dtype), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of gate_up [T, 2I] = gate | up with contiguous rows -> [T, I]; float32 inside."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    block = min(_BLOCK, triton.next_power_of_2(width))
    grid = (num_rows, triton.cdiv(width, block))
    _silu_mul_kernel[grid](
        gate_up,
        out,
        gate_up.stride(0),
        out.stride(0),
        width=width,
        block=block,
        num_warps=max(block // 256, 1),
        **launch_options(gate_up.device),
    )
    return out
