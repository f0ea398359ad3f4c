"""Which CPUs a worker runs on: some of those next to its GPU. A process on the other side of the machine launches
kernels and copies weights more slowly."""

import os
from collections.abc import Iterable
from pathlib import Path

from tokenmill_engine.config.device import pci_address, physical_cores, read_system_file

_SYSTEM = Path("/sys")
_NVIDIA, _DISPLAY = "0x10de", "0x03"
"""Of a GPU: its vendor, and what its class begins with."""
_FEWEST_CORES = 2
"""Physical ones of a worker: fewer are not taken for itself alone."""


def stay_near_gpu(index: int) -> set[int]:
    """Keeps all threads that this process has or will have on CPUs next to the visible CUDA device `index`. Returns
    these, or nothing if they stay where they are. The CPUs that the process may use never become more."""
    address = pci_address(index)
    cpus = set() if address is None else near_cpus(address, os.sched_getaffinity(0))
    if not cpus:
        return set()
    moved: set[str] = set()
    # A thread that has not moved yet may start others meanwhile.
    while left := set(os.listdir("/proc/self/task")) - moved:
        for thread in left:
            try:
                os.sched_setaffinity(int(thread), cpus)
            except ProcessLookupError:
                continue
            except OSError:  # this machine does not let us
                return set()
        moved |= left
    return cpus


def near_cpus(address: str, usable: Iterable[int], system: Path = _SYSTEM) -> set[int]:
    """Those of `usable` for who uses the GPU at a PCI `address`: of the CPUs of its NUMA node a part, if other GPUs are
    there as well and all of them get enough. Empty if the machine does not say which are near, or none of them is
    usable. `system` is where the kernel describes the machine."""
    pci = system / "bus" / "pci" / "devices"
    node = read_system_file(pci / address / "numa_node")
    near = _parsed(read_system_file(pci / address / "local_cpulist")) & set(usable)
    if node is None or int(node) < 0 or not near:
        return set()
    gpus = sorted(
        device.name
        for device in pci.iterdir()
        if read_system_file(device / "vendor") == _NVIDIA
        and (read_system_file(device / "class") or "").startswith(_DISPLAY)
        and read_system_file(device / "numa_node") == node
    )
    cores = physical_cores(near, system / "devices" / "system" / "cpu")
    if address not in gpus or len(cores) < _FEWEST_CORES * len(gpus):
        return near
    turn = gpus.index(address)
    first, last = (turn * len(cores) // len(gpus), (turn + 1) * len(cores) // len(gpus))
    return {cpu for core in cores[first:last] for cpu in core}


def _parsed(ranges: str | None) -> set[int]:
    """Of a list such as `0-3,8`."""
    cpus: set[int] = set()
    for part in filter(None, (ranges or "").split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
