"""What the launchers need to know about a device. CPU tensors reach the kernels only through Triton's interpreter."""

from dataclasses import dataclass
from functools import cache

import torch
import triton


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Limits of a device that fix launch shapes."""

    num_sms: int
    shared_memory_bytes: int
    """Shared memory that one thread block may use."""


@cache
def device_limits(device: torch.device) -> DeviceLimits:
    """Limits of a CUDA device; a small made-up one for the interpreter, where programs run one after the other."""
    if device.type != "cuda":
        return DeviceLimits(num_sms=3, shared_memory_bytes=228 * 1024)
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return DeviceLimits(properties["multiprocessor_count"], properties["max_shared_mem"])


COMPILE_OPTIONS = {"enable_fp_fusion": True}
"""For every launch: a multiply and an add may become one rounding, whatever the default of the Triton release."""
