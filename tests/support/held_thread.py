"""Holds one thread of another process, as a debugger does: the others go on."""

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator

_PTRACE_ATTACH = 16
_PTRACE_DETACH = 17
_WALL = 0x40000000
"""Wait for threads of whatever kind."""


@contextlib.contextmanager
def held_main_thread(pid: int, hides_death: bool = False) -> Iterator[None]:
    """While the context is entered, the main thread of `pid`, a descendant of this process, does not run. It may
    be killed meanwhile; with `hides_death` its parent hears of that only afterwards, as if it hung in the kernel."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(_PTRACE_ATTACH, pid, None, None) != 0:
        raise OSError(ctypes.get_errno(), f"cannot trace process {pid}")
    os.waitpid(pid, _WALL)
    left = threading.Event()
    reaper = threading.Thread(target=_reap, args=(pid, left))
    if not hides_death:
        reaper.start()
    try:
        yield
    finally:
        if not hides_death:
            left.set()
            reaper.join()
        if libc.ptrace(_PTRACE_DETACH, pid, None, None) != 0 and hides_death:
            os.waitpid(pid, _WALL)


def _reap(pid: int, left: threading.Event) -> None:
    """The parent of a traced process hears of its death only after the tracer has."""
    while not left.wait(0.05):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG | _WALL) != (0, 0):
                return
