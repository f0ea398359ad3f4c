"""Where Tokenmill keeps files that only save time: as `tokenmill_kernels.cpu.build.cache_dir`, for what may not import
kernels."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """TOKENMILL_CACHE_DIR, or `tokenmill` in the user's cache directory.

    Raises:
        RuntimeError: the user has no home directory and names no other place.
    """
    chosen = os.environ.get("TOKENMILL_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenmill"
