"""What torch and the kernels find on this machine, as JSON on standard output: `tokenmill collect-env` runs this module
in a process of its own, because a driver that hangs or crashes is what may have to be reported.

    python -m tokenmill_engine.worker.machine_report
"""

import json
import sys
from typing import Any

import torch
import triton

from tokenmill_kernels.cpu.build import BuildError, build, find_compiler


def machine_report() -> dict[str, Any]:
    """Facts by name; lists have an entry for each GPU. Compiles the CPU kernels if that was not done yet."""
    return {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "CUDA of torch": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "NCCL": _nccl_version(),
        "CPU instructions for torch": torch.backends.cpu.get_cpu_capability(),
        "CPU threads of torch": torch.get_num_threads(),
        "C++ compiler": find_compiler(),
        "CPU kernels": _cpu_kernels(),
        "GPUs": [_gpu(index) for index in range(torch.cuda.device_count())],
    }


def _gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return (
        f"{properties.name}, capability {properties.major}.{properties.minor}, "
        f"{properties.multi_processor_count} multiprocessors, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    )


def _nccl_version() -> str | None:
    if not torch.cuda.is_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _cpu_kernels() -> str:
    try:
        return str(build())
    except BuildError as error:
        return f"none: {error}"


if __name__ == "__main__":
    json.dump(machine_report(), sys.stdout)
