"""Programs that compile kernels for a GPU, without one."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path


def compiling(command: Sequence[str], cache: Path) -> subprocess.CompletedProcess[str]:
    """Runs `command`, in which Triton compiles and keeps the texts of all stages, in `cache` alone: a cache of earlier
    programs may have no more of a kernel than its binary."""
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_STORE_BINARY_ONLY": "0",
        "TRITON_CACHE_DIR": str(cache),
    }
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
