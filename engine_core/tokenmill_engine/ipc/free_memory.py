"""What a process that has started does about memory that its start took for a moment."""

import contextlib
import ctypes


def return_free_memory() -> None:
    """Gives the system what is free in this process. It takes some milliseconds."""
    with contextlib.suppress(AttributeError, OSError):  # other libraries than glibc have no such function
        ctypes.CDLL(None).malloc_trim(0)
