"""Small host arrays on their way to the device."""

import numpy as np
import torch
from numpy.typing import NDArray


def to_device(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A device copy of `array`, which the caller must not change afterwards.

    On CUDA through pinned memory and without waiting (the allocator keeps the pinned block until the copy is done);
    on the CPU memory is shared.
    """
    tensor: torch.Tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
