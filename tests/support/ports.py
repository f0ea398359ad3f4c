"""Ports for servers that must be told theirs, or whose port must be free again when they are gone."""

import os
import random
import socket
from pathlib import Path

_LOWEST = 10_000
_NAMED: set[int] = set()
_NUM_PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_PROCESS = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
"""Which of the processes that run tests at once this is: none names a port of another's."""


def free_port() -> int:
    """A TCP port that nobody listens on, another one with each call. It is none of those that the kernel gives to
    whoever names no port, so nobody gets it by chance before it is used, or right after."""
    lowest_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = range(_LOWEST + _PROCESS, max(lowest_given, _LOWEST + 20_000), _NUM_PROCESSES)
    while True:
        port = random.SystemRandom().choice(candidates)
        if port not in _NAMED and _is_free(port):
            _NAMED.add(port)
            return port


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True
