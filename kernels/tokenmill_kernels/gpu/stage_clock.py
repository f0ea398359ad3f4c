"""How long the stages of a pipeline work on a step, measured on the device: it can go on to the next stage with what
that computes from, and no host waits for it.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from tokenmill_kernels.gpu.launch import launch_options, let_dependents_start, wait_for_inputs


@triton.jit
def _start_kernel(started_ptr, is_real: tl.constexpr, pdl: tl.constexpr):
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    if is_real:
        tl.store(started_ptr, tl.extra.cuda.globaltimer())


@triton.jit
def _stop_kernel(started_ptr, slowest_ptr, before_ptr, is_real: tl.constexpr, pdl: tl.constexpr):
    """`before_ptr` is None if there is no stage before."""
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    elapsed = tl.load(started_ptr)
    if is_real:
        elapsed = tl.extra.cuda.globaltimer() - elapsed
    if before_ptr is not None:
        elapsed = tl.maximum(elapsed, tl.load(before_ptr))
    tl.store(slowest_ptr, elapsed)


class StageClock:
    """Of one stage. Its calls enqueue, and may be captured. In the interpreter no time passes."""

    def __init__(self, slowest: torch.Tensor) -> None:
        """`slowest` int64 [1], ns: what `stop` writes."""
        device = slowest.device
        self._slowest, self._started = slowest, torch.zeros(1, dtype=torch.int64, device=device)
        self._options = {"is_real": device.type == "cuda", "num_warps": 1, **launch_options(device)}

    def start(self) -> None:
        """The stage begins with a step."""
        _start_kernel[(1,)](self._started, **self._options)

    def stop(self, before: torch.Tensor | None) -> None:
        """It is done with it: `slowest` becomes the time that it took, or `before` int64 [1], that of the slowest stage
        before it, if that is more."""
        _stop_kernel[(1,)](self._started, self._slowest, before, **self._options)
