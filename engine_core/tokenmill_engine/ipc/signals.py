"""Which signals mean what to the processes of a server.

Service managers, containers and terminals may signal all of them at once. Only the launcher answers, and tells the
others over their control channels; if those ended by themselves, open requests would be cut off instead of finished.
"""

import contextlib
import signal
from collections.abc import Iterator

OUTSIDE_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""The launcher's to answer; children ignore them."""
END_SIGNAL = signal.SIGUSR2
"""From a parent to its children: end now. Also from the kernel, when the parent is gone. Nobody else sends it."""


@contextlib.contextmanager
def outside_signals_blocked() -> Iterator[None]:
    """A child that this thread starts in the block is deaf to `OUTSIDE_SIGNALS` until `ignore_outside_signals`. Those
    for this process are not lost: another thread takes them, or this one after the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OUTSIDE_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_outside_signals() -> None:
    """Also those that came while they were blocked. Main thread only."""
    for number in OUTSIDE_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OUTSIDE_SIGNALS)
