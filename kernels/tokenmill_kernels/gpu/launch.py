"""What the launchers need to know about a device. CPU tensors reach the kernels only through Triton's interpreter."""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

_FIRST_DEPENDENT_LAUNCH_CAPABILITY = (9, 0)


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Limits of a device that fix launch shapes."""

    num_sms: int
    shared_memory_bytes: int
    """Shared memory that one thread block may use."""
    memory_bandwidth: float
    """Bytes per second between the device and its memory, by clock and width."""


@cache
def device_limits(device: torch.device) -> DeviceLimits:
    """Limits of a CUDA device; a small made-up one for the interpreter, where programs run one after the other."""
    if device.type != "cuda":
        return DeviceLimits(num_sms=3, shared_memory_bytes=228 * 1024, memory_bandwidth=0.0)
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    # Kilohertz, with two transfers in each period, and bits.
    bandwidth = 2e3 * properties["mem_clock_rate"] * properties["mem_bus_width"] / 8
    return DeviceLimits(properties["multiprocessor_count"], properties["max_shared_mem"], bandwidth)


COMPILE_OPTIONS = {"enable_fp_fusion": True}
"""For every launch: a multiply and an add may become one rounding, whatever the default of the Triton release."""


@cache
def dependent_launch(device: torch.device) -> bool:
    """Whether kernels may start while the one before them ends (programmatic dependent launch, Hopper and later).

    A kernel that is launched so calls `wait_for_inputs` before it touches anything that another kernel wrote, and
    `let_dependents_start` only after that, in every program and on every path. So when a kernel starts, all those
    before the one right before it are done: what they wrote may be read without waiting.

    The one exception is `attention_decode.merge_kernel`, which lets its dependent start before it has waited. When the
    launch right after it starts, the decode launch before it may still run, and with it the lifetime of all that the
    two read and write. That launch, whichever it is, touches nothing but weights before its `wait_for_inputs`, which
    returns when both are done; those after it are in no way special, since it keeps the rule above. A kernel that
    reads results or writes anything before it waits must therefore not be launched right after `paged_attention`.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_DEPENDENT_LAUNCH_CAPABILITY


@cache
def launch_options(device: torch.device) -> dict[str, object]:
    """Keyword arguments of a launch of a kernel with a constexpr `pdl`, which calls the two functions below."""
    pdl = dependent_launch(device)
    return {**COMPILE_OPTIONS, "pdl": pdl, **({"launch_pdl": True} if pdl else {})}


@triton.jit
def wait_for_inputs(pdl: tl.constexpr):
    """Blocks until the kernels before this one are done and their writes visible."""
    if pdl:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_dependents_start(pdl: tl.constexpr):
    """The next kernel may start now; it still waits for the end of this one before it touches what this one writes."""
    if pdl:
        tl.extra.cuda.gdc_launch_dependents()
