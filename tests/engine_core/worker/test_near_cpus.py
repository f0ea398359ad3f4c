"""Which CPUs a worker takes, from made-up descriptions of machines; and that all threads of a process move."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tokenmill_engine.worker.near_cpus import near_cpus, stay_near_gpu

GPU, BRIDGE, NETWORK = "0x030200", "0x068000", "0x020000"


def device(root: Path, address: str, node: str, cpus: str, kind: str = GPU, vendor: str = "0x10de") -> None:
    folder = root / "bus" / "pci" / "devices" / address
    folder.mkdir(parents=True)
    for name, text in {"numa_node": node, "local_cpulist": cpus, "class": kind, "vendor": vendor}.items():
        (folder / name).write_text(f"{text}\n")


def hyperthreads(root: Path, siblings: Mapping[int, str]) -> None:
    for cpu, text in siblings.items():
        folder = root / "devices" / "system" / "cpu" / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{text}\n")


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """Eight cores on each, with two hyperthreads; three GPUs on the first, one on the second, and other devices."""
    hyperthreads(tmp_path, {cpu: f"{cpu % 16},{cpu % 16 + 16}" for cpu in range(32)})
    for address in ("0000:1b:00.0", "0000:3b:00.0", "0000:43:00.0"):
        device(tmp_path, address, "0", "0-7,16-23")
    device(tmp_path, "0000:9b:00.0", "1", "8-15,24-31")
    device(tmp_path, "0000:05:00.0", "0", "0-7,16-23", BRIDGE)
    device(tmp_path, "0000:06:00.0", "0", "0-7,16-23", NETWORK, "0x15b3")
    device(tmp_path, "0000:07:00.0", "0", "0-7,16-23", "0x030000", "0x1a03")
    return tmp_path


def test_gpus_of_a_node_have_its_cores_between_them(two_sockets: Path) -> None:
    """Both threads of a core stay together."""
    taken = [near_cpus(f"0000:{bus}:00.0", range(32), two_sockets) for bus in ("1b", "3b", "43")]
    assert taken == [{0, 1, 16, 17}, {2, 3, 4, 18, 19, 20}, {5, 6, 7, 21, 22, 23}]
    assert near_cpus("0000:9b:00.0", range(32), two_sockets) == {*range(8, 16), *range(24, 32)}


def test_never_more_than_the_process_may_use(two_sockets: Path) -> None:
    usable = [0, 2, 4, 5, 6, 7, 9]
    taken = [near_cpus(f"0000:{bus}:00.0", usable, two_sockets) for bus in ("1b", "3b", "43", "9b")]
    assert taken == [{0, 2}, {4, 5}, {6, 7}, {9}]


def test_too_few_cores_are_shared(two_sockets: Path) -> None:
    usable = {0, 1, 2, 3, 4, 16}
    for bus in ("1b", "3b", "43"):
        assert near_cpus(f"0000:{bus}:00.0", usable, two_sockets) == usable


def test_nothing_is_known_or_near(two_sockets: Path) -> None:
    device(two_sockets, "0000:c1:00.0", "-1", "0-31")
    assert near_cpus("0000:c1:00.0", range(32), two_sockets) == set()
    assert near_cpus("0000:ee:00.0", range(32), two_sockets) == set()
    assert near_cpus("0000:9b:00.0", range(8), two_sockets) == set()
    assert near_cpus("0000:9b:00.0", range(8), two_sockets / "nowhere") == set()


def test_a_node_of_one_gpu_without_a_topology(tmp_path: Path) -> None:
    device(tmp_path, "0000:00:05.0", "0", "0-2")
    assert near_cpus("0000:00:05.0", range(8), tmp_path) == {0, 1, 2}


MOVED = """
import os, threading
from tokenmill_engine.worker import near_cpus

usable = os.sched_getaffinity(0)
near = {min(usable)}
near_cpus.pci_address = lambda index: "0000:00:05.0"
near_cpus.near_cpus = lambda address, cpus: near if cpus == usable else set()
hold, here = threading.Event(), threading.Barrier(4)

def wait():
    here.wait()
    hold.wait()

threads = [threading.Thread(target=wait) for _ in range(3)]
for thread in threads:
    thread.start()
here.wait()
assert near_cpus.stay_near_gpu(0) == near
later = threading.Thread(target=hold.wait)
later.start()
tasks = os.listdir("/proc/self/task")
assert len(tasks) >= 5
print(all(os.sched_getaffinity(int(task)) == near for task in tasks))
hold.set()
"""


def test_all_threads_move_and_later_ones_follow() -> None:
    done = subprocess.run([sys.executable, "-c", MOVED], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_without_a_gpu_nothing_moves() -> None:
    before = os.sched_getaffinity(0)
    assert stay_near_gpu(1 << 20) == set()
    assert os.sched_getaffinity(0) == before
