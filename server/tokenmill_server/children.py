"""The end of child processes: how to bring it about, and how to tell of it."""

import os
import signal
import time
from collections.abc import Iterable
from typing import Any

from tokenmill_engine.ipc.child import ChildProcess

_TERMINATE_GRACE_S = 1.0
_STOP_POLL_S = 0.01


def stop_children(children: Iterable[ChildProcess[Any]]) -> None:
    """Tells each child to end, by SIGTERM and the end of its channel; a moment later kills it and whatever it
    started. Returns when all are reaped."""
    running = [child for child in children if child.process.returncode is None]
    processes = [child.process for child in running]
    for child in running:
        os.kill(child.process.pid, signal.SIGTERM)
        child.channel.close()
    deadline = time.monotonic() + _TERMINATE_GRACE_S
    while time.monotonic() < deadline and not all(_has_ended(process.pid) for process in processes):
        time.sleep(_STOP_POLL_S)
    for process in processes:
        # Not reaped yet, so the number still belongs to this child's process group.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def describe_exit(returncode: int) -> str:
    """How a child ended, as the predicate of a sentence."""
    if returncode == -signal.SIGKILL:
        return (
            "was killed (SIGKILL); if the kernel did so for want of memory, lower --kv-cache-memory-bytes "
            "or --data-parallel-size"
        )
    if returncode < 0:
        return f"was ended by {signal.Signals(-returncode).name}"
    return f"exited with status {returncode}"
