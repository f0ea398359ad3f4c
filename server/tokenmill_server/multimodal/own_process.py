"""Settings of processes that are ours and prepare media. `LLM` prepares them in its user's process, which stays as it
is."""

import ctypes
import sys
from contextlib import suppress

_SWITCH_INTERVAL_S = 0.001
"""How long a media thread goes on once the event loop wants to: a fifth of Python's own, since several threads may be
asked one after another."""
_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 8 << 20
"""Pillow has its pixels in blocks of 16 MiB."""


def prepare_beside_event_loop() -> None:
    """For a process whose event loop must not wait for threads that prepare media, and which lives long."""
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))
    return_large_blocks()


def return_large_blocks() -> None:
    """From now on this process gives large blocks of memory back once they are free. By itself glibc keeps them after
    it has seen some, for each thread its own: several times of what images take at a time."""
    with suppress(AttributeError, OSError):  # other libraries have no such setting
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
