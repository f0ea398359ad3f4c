"""Writes of many short runs into one large buffer, read straight from pinned host memory."""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from tokenmill_kernels.gpu.launch import launch_options, let_dependents_start, wait_for_inputs

_BLOCK = 1024


@triton.jit
def _scatter_runs_kernel(buffer_ptr, runs_ptr, values_ptr, block: tl.constexpr, pdl: tl.constexpr):
    """Run program_id(0), its blocks dealt out over program_id(1)."""
    run_ptr = runs_ptr + 3 * tl.program_id(0)
    offset, first, length = tl.load(run_ptr), tl.load(run_ptr + 1), tl.load(run_ptr + 2)
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    step = tl.num_programs(1) * block
    for done in range(tl.program_id(1) * block, length, step):
        columns = done + tl.arange(0, block)
        inside = columns < length
        values = tl.load(values_ptr + first + columns, mask=inside, other=0)
        tl.store(buffer_ptr + offset + columns, values, mask=inside)


def scatter_runs(buffer: torch.Tensor, runs: torch.Tensor, values: torch.Tensor, longest: int) -> None:
    """buffer[offset : offset + length] = values[first : first + length] for each row (offset, first, length) of `runs`.

    `buffer` and `values` are contiguous and share a dtype, `runs` is int64 [n, 3]; no run is longer than `longest`.
    `runs` and `values` may be in pinned host memory: the device reads them from there, so they must stay as they are
    until the launch is done.
    """
    _scatter_runs_kernel[(runs.shape[0], min(triton.cdiv(longest, _BLOCK), 8))](
        buffer, runs, values, block=_BLOCK, num_warps=4, **launch_options(buffer.device)
    )
