"""Processes of others, which may end and be reaped at any moment."""

import psutil

from tests.support.server import wait_for


def has_ended(process: psutil.Process) -> bool:
    """Whether it runs no more; one that is not our child may stay a zombie until its new parent reaps it."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for_end(process: psutil.Process, timeout_s: float = 60.0) -> None:
    """Until it runs no more."""
    wait_for(lambda: has_ended(process), timeout_s, f"end of {process}")
