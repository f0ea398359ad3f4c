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
def _stop_kernel(started_ptr, times_ptr, before_ptr, is_real: tl.constexpr, pdl: tl.constexpr):
    """`before_ptr` is None if there is no stage before."""
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    elapsed = tl.load(started_ptr)
    if is_real:
        elapsed = tl.extra.cuda.globaltimer() - elapsed
    if before_ptr is None:
        elapsed += tl.load(times_ptr + 1)
    else:
        elapsed = tl.maximum(elapsed, tl.load(before_ptr))
        tl.store(times_ptr + 1, tl.load(before_ptr + 1))
    tl.store(times_ptr, elapsed)


@triton.jit
def _stop_encoding_kernel(started_ptr, times_ptr, is_real: tl.constexpr, pdl: tl.constexpr):
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    elapsed = tl.load(started_ptr)
    if is_real:
        elapsed = tl.extra.cuda.globaltimer() - elapsed
    tl.store(times_ptr + 1, elapsed)


class StageClock:
    """Of one stage. Its calls enqueue, and may be captured. In the interpreter no time passes."""

    def __init__(self, times: torch.Tensor) -> None:
        """`times` int64 [2], ns: how long the slowest stage takes, and how long the first one encodes media; written by
        `stop`, and the second in the first stage by calls with "encod" in their names."""
        device = times.device
        self._times = times
        self._started, self._began_encoding = torch.zeros(2, 1, dtype=torch.int64, device=device)
        self._options = {"is_real": device.type == "cuda", "num_warps": 1, **launch_options(device)}

    def start_encoding(self) -> None:
        """The first stage begins to encode, before `start`."""
        _start_kernel[(1,)](self._began_encoding, **self._options)

    def stop_encoding(self) -> None:
        """It is done with that, before `start`."""
        _stop_encoding_kernel[(1,)](self._began_encoding, self._times, **self._options)

    def encode_nothing(self) -> None:
        """From now on the first stage encodes nothing."""
        self._times[1:].zero_()

    def start(self) -> None:
        """The stage begins with a step."""
        _start_kernel[(1,)](self._started, **self._options)

    def stop(self, before: torch.Tensor | None) -> None:
        """It is done with it. `before`: the times of the stage before; None in the first stage, whose encoding counts
        as a part of its work."""
        _stop_kernel[(1,)](self._started, self._times, before, **self._options)
