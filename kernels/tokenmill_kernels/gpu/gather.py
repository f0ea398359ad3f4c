"""Gather of the rows that go on when others have done their part."""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from tokenmill_kernels.gpu.launch import launch_options, let_dependents_start, wait_for_inputs

_BLOCK = 2048


@triton.jit
def _gather_rows_kernel(
    first_out_ptr, second_out_ptr, first_ptr, second_ptr, rows_ptr, first_stride, second_stride, first_width,
    second_width, block: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Columns [program_id(1) * block, ...) of output row program_id(0) of both."""
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    source = tl.load(rows_ptr + row).to(tl.int64)
    first_owned = columns < tl.where(source >= 0, first_width, 0)
    second_owned = columns < tl.where(source >= 0, second_width, 0)
    first = tl.load(first_ptr + source * first_stride + columns, mask=first_owned, other=0.0)
    second = tl.load(second_ptr + source * second_stride + columns, mask=second_owned, other=0.0)
    tl.store(first_out_ptr + row * first_width + columns, first, mask=columns < first_width)
    tl.store(second_out_ptr + row * second_width + columns, second, mask=columns < second_width)


def gather_rows(first: torch.Tensor, second: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `rows` int32 [R] of `first` [T, N] and of `second` [T, M]; zeros where `rows` is negative."""
    num_rows, widest = rows.shape[0], max(first.shape[1], second.shape[1])
    assert first.stride(1) == second.stride(1) == 1
    outs = [torch.empty((num_rows, part.shape[1]), dtype=part.dtype, device=part.device) for part in (first, second)]
    block = min(triton.next_power_of_2(widest), _BLOCK)
    _gather_rows_kernel[(num_rows, triton.cdiv(widest, block))](
        *outs,
        first,
        second,
        rows,
        first.stride(0),
        second.stride(0),
        first.shape[1],
        second.shape[1],
        block=block,
        num_warps=min(max(block // 256, 1), 8),
        **launch_options(first.device),
    )
    return outs[0], outs[1]
