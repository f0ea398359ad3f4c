"""Programs that end when their starter is killed, although they know nothing of it."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def die_with_this_process(number: signal.Signals = signal.SIGKILL) -> Callable[[], None] | None:
    """For `preexec_fn` of a `Popen` in the main thread: the program gets the signal `number` when that thread has
    ended, and does not begin if it has already. None where the kernel does not know such a thing.

    What runs between fork and exec may find locks held by threads that are not there, so everything is looked up
    before.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    arguments = [ctypes.c_ulong(each) for each in (int(number), 0, 0, 0)]
    starter, getppid, end = os.getpid(), os.getppid, os._exit
    # A shell may have started us deaf to Ctrl-C, which programs inherit.
    hear = None if number is signal.SIGKILL else signal.signal

    def set_death_signal() -> None:
        if hear is not None:
            hear(number, signal.SIG_DFL)
        prctl(_PR_SET_PDEATHSIG, *arguments)
        if getppid() != starter:
            end(1)

    return set_death_signal
