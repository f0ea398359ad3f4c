"""The end of child processes, and how to bring it about."""

import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from typing import Any

from tokenmill_engine.ipc.child import ChildProcess
from tokenmill_engine.ipc.signals import END_SIGNAL
from tokenmill_server.watcher import ChildKey, Watcher

logger = logging.getLogger(__name__)

_TERMINATE_GRACE_S = 1.0
_KILL_GRACE_S = 10.0
"""A process that SIGKILL has not ended after this hangs in the kernel, as in the driver of a broken device."""
_STOP_POLL_S = 0.01


def stop_children(children: Iterable[ChildProcess[Any]]) -> None:
    """Tells each child to end, by `END_SIGNAL` and the end of its channel; a moment later kills it and whatever it
    started. Returns when all are reaped; one that not even that ends is left behind, which is logged."""
    running = [child for child in children if child.process.returncode is None]
    processes = [child.process for child in running]
    for child in running:
        os.kill(child.process.pid, END_SIGNAL)
        child.channel.close()
    _wait_for_ends(processes, _TERMINATE_GRACE_S)
    for process in processes:
        # Not reaped yet, so the number still belongs to this child's process group.
        os.killpg(process.pid, signal.SIGKILL)
    _wait_for_ends(processes, _KILL_GRACE_S)
    for process in processes:
        if process.poll() is None:
            logger.error("process %d does not end, even though it was killed; it is left behind", process.pid)


def watch_child(watcher: Watcher, key: ChildKey, child: ChildProcess[Any]) -> None:
    """Lets `watcher` watch a child that has just been started. Raises OSError if it cannot; the child is gone then."""
    try:
        watcher.add(key, child)
    except OSError:
        stop_children((child,))
        raise


def _wait_for_ends(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and not all(_has_ended(process.pid) for process in processes):
        time.sleep(_STOP_POLL_S)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
