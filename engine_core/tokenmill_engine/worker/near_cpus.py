"""Which CPUs a worker runs on: some of those next to its GPU. A process on the other side of the machine launches
kernels and copies weights more slowly; one that shares too few CPUs with others is slower still."""

import contextlib
import logging
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from tokenmill_engine.config.device import pci_address, physical_cores, read_system_file

logger = logging.getLogger(__name__)

_SYSTEM = Path("/sys")
_THREADS = "/proc/self/task"
_NVIDIA, _DISPLAY = "0x10de", "0x03"
"""Of a GPU: its vendor, and what its class begins with."""
_FEWEST_CORES = 2
"""Physical ones of a worker: with fewer for itself alone it stays where it is."""
_LEAST_SHARE = 0.5
"""Of what a worker would have if all GPUs of the machine shared all cores. On machines with more GPUs on one side than
on the other the workers there have fewer cores, which is still better than far ones."""
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_NODE = re.compile(r"-?\d{1,9}")


def stay_near_gpu(index: int) -> set[int]:
    """Keeps all threads that this process has or will have on CPUs next to the visible CUDA device `index`. Returns
    these, or nothing if all stay where they are. The CPUs that the process may use never become more."""
    address = pci_address(index)
    if address is None:
        return set()
    try:
        usable = os.sched_getaffinity(0)
        cpus = near_cpus(address, usable)
        if cpus:
            _move(cpus, usable)
        return cpus
    except OSError as error:  # this machine does not let us
        logger.debug("GPU %s: CPUs stay as they are: %s", address, error)
        return set()


def _move(cpus: set[int], usable: set[int]) -> None:
    """All threads of this process to `cpus`. Raises OSError, with every thread where it was: one that did not exist
    when this began goes to `usable`, if it is at `cpus` now."""
    before: dict[str, set[int]] = {}
    try:
        # A thread that has not moved yet may start others meanwhile.
        while left := set(os.listdir(_THREADS)) - before.keys():
            for thread in left:
                before[thread] = set()
                with contextlib.suppress(ProcessLookupError):
                    before[thread] = os.sched_getaffinity(int(thread))
                    os.sched_setaffinity(int(thread), cpus)
    except OSError:
        _move_back(cpus, usable, before)
        raise


def _move_back(cpus: set[int], usable: set[int], before: dict[str, set[int]]) -> None:
    done: set[str] = set()
    while left := set(os.listdir(_THREADS)) - done:
        for thread in left:
            with contextlib.suppress(OSError):
                if os.sched_getaffinity(int(thread)) == cpus:
                    os.sched_setaffinity(int(thread), before.get(thread) or usable)
        done |= left


def near_cpus(address: str, usable: Collection[int], system: Path = _SYSTEM) -> set[int]:
    """Those of `usable` for who uses the GPU at a PCI `address`: of the CPUs of its NUMA node the part that is this
    GPU's, if others are there as well. Empty if that is too little, or the machine does not say clearly which are near.
    `system` is where the kernel describes the machine."""
    try:
        return _own_cpus(address, usable, system)
    except (OSError, ValueError) as error:  # such a file is not there, or holds something else
        logger.debug("GPU %s: CPUs stay as they are: %s", address, error)
        return set()


def _own_cpus(address: str, usable: Collection[int], system: Path) -> set[int]:
    """Raises OSError or ValueError instead of an empty set."""
    pci = system / "bus" / "pci" / "devices"
    node = read_system_file(pci / address / "numa_node") or ""
    if not _NODE.fullmatch(node):
        raise ValueError(f"its NUMA node is given as {node!r}")
    if int(node) < 0:
        raise ValueError("its NUMA node is unknown")
    near = _chosen(usable, read_system_file(pci / address / "local_cpulist") or "")
    gpus = {
        device.name: read_system_file(device / "numa_node")
        for device in pci.iterdir()
        if read_system_file(device / "vendor") == _NVIDIA
        and (read_system_file(device / "class") or "").startswith(_DISPLAY)
    }
    gpus[address] = node
    neighbours = sorted(name for name, place in gpus.items() if place == node)
    topology = system / "devices" / "system" / "cpu"
    cores = physical_cores(near, topology)
    least = max(_FEWEST_CORES, _LEAST_SHARE * len(physical_cores(usable, topology)) / len(gpus))
    if len(cores) < least * len(neighbours):
        raise ValueError(f"usable cores near it: {len(cores)}, GPUs there: {len(neighbours)}, of each: {least:g}")
    turn = neighbours.index(address)
    first, last = (turn * len(cores) // len(neighbours), (turn + 1) * len(cores) // len(neighbours))
    return {cpu for core in cores[first:last] for cpu in core}


def _chosen(cpus: Iterable[int], ranges: str) -> set[int]:
    """Those in a list such as `0-3,8`. Raises ValueError if it looks otherwise; it may be empty."""
    bounds: list[tuple[int, int]] = []
    for part in ranges.split(",") if ranges else ():
        found = _RANGE.fullmatch(part)
        if found is None:
            raise ValueError(f"the CPUs near it are given as {ranges!r}")
        bounds.append((int(found[1]), int(found[2] or found[1])))
    return {cpu for cpu in cpus if any(first <= cpu <= last for first, last in bounds)}
