"""What a child process owes its parent: a readable title, and to end when the parent does or a thread of its own fails.

Two nets, because each has a hole. The kernel's parent-death signal is instant, but is lost if the parent dies before
`prctl`, hence the check afterwards. The control channel's end of file is certain, but needs a thread that can run.
"""

import contextlib
import ctypes
import logging
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

import psutil
import setproctitle

from tokenmill_engine.ipc.channel import ChannelClosedError, ControlChannel
from tokenmill_engine.ipc.signals import ignore_outside_signals

T = TypeVar("T")

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_START_TIME_FIELD = 19
"""Of /proc/self/stat, from the state on: ticks from the start of the machine to that of the process."""
_REMOVAL_ATTEMPTS = 5
"""Another thread, or another process that has not noticed yet, may put a file into a folder while it is removed."""
_CLOSE_WAIT_S = 1.0
"""How much later than its death signal a dying parent closes its sockets, at most."""


def become_child(
    title: str, parent_pid: int, death_signal: signal.Signals = signal.SIGKILL, run_dir: str | None = None
) -> None:
    """Set the process title, arrange for `death_signal` at the parent's death and leave Ctrl-C, SIGTERM and the like to
    the launcher.

    Call it early in the child's main thread. If the parent is gone already, `run_dir` is removed and this exits.
    """
    ignore_outside_signals()
    set_title(title)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        exit_orphaned(run_dir)


def set_title(title: str) -> None:
    """What `ps` shows, after our name."""
    setproctitle.setproctitle(f"tokenmill: {title}")


def process_began() -> float:
    """When this process began, of the monotonic clock, which all processes of the machine share."""
    try:
        # The fields after the name, which may hold anything, from the third on.
        fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[_START_TIME_FIELD]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError):  # not Linux
        age = time.time() - psutil.Process().create_time()
    return time.monotonic() - max(0.0, age)


def watch_parent(channel: ControlChannel[T], on_message: Callable[[T], None], run_dir: str | None) -> threading.Thread:
    """Read the control channel in a daemon thread; `on_message` is called there.

    At the end of file the parent is gone: `run_dir`, if there is one to see to, is removed and the process exits with
    status 1, whatever its other threads are doing. So it does if `on_message` fails: nobody would listen to the parent
    any more.
    """

    def watch() -> None:
        while True:
            try:
                message = channel.receive()
            except ChannelClosedError:
                exit_orphaned(run_dir)
            on_message(message)

    thread = threading.Thread(target=die_with, args=(watch,), name="parent-watcher", daemon=True)
    thread.start()
    return thread


def exit_terminated(channel: ControlChannel[T], run_dir: str) -> NoReturn:
    """End this process after `END_SIGNAL`. If it was the parent's death signal, `run_dir` is removed first.

    The parent's number tells nothing yet: the kernel sends the signal when the thread that started us ends, and
    until its last thread has ended the parent is still there. The channel's end of file follows a moment later.
    """
    poller = select.poll()
    poller.register(channel.fileno(), select.POLLRDHUP)
    if poller.poll(_CLOSE_WAIT_S * 1000):
        exit_orphaned(run_dir)
    os._exit(0)


def exit_orphaned(run_dir: str | None) -> NoReturn:
    """Remove `run_dir`, if there is one, and end this process: the parent is gone and cannot clean up any more."""
    if run_dir is not None:
        _remove(run_dir)
    os._exit(1)


def _remove(run_dir: str) -> None:
    for _ in range(_REMOVAL_ATTEMPTS):
        shutil.rmtree(run_dir, ignore_errors=True)
        if not os.path.exists(run_dir):
            return


def die_with(work: Callable[[], None]) -> None:
    """Run a thread's work; if it fails, the process is of no use without it."""
    try:
        work()
    except BaseException:
        logger.exception("thread %s failed", threading.current_thread().name)
        exit_at_once(1)


def exit_at_once(status: int) -> NoReturn:
    """End without the interpreter's orderly end, which would pull native code from under threads that are inside it."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # full, closed, not there
            stream.flush()
    os._exit(status)
