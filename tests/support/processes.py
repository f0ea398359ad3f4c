"""Processes of others, which may end and be reaped at any moment."""

from collections.abc import Sequence

import psutil

from tests.support.server import PATIENCE_S, has_ended, wait_for


def wait_for_end(process: psutil.Process, timeout_s: float = 60.0) -> None:
    """Until it runs no more."""
    wait_for(lambda: has_ended(process), timeout_s, f"end of {process}")


def wait_for_ends(processes: Sequence[psutil.Process]) -> None:
    """Until none of them runs any more."""
    wait_for(lambda: all(map(has_ended, processes)), PATIENCE_S, f"end of {processes}")


def children_with(word: str) -> list[psutil.Process]:
    """Living children of this process whose command line has `word`. There may be others, from tests before or of
    Python's own."""
    found = []
    for child in psutil.Process().children():
        try:
            if any(word in each for each in child.cmdline()):
                found.append(child)
        except psutil.Error:
            continue
    return found
