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
    usable = [0, 2, 4, 5, 6, 7, 9, 12]
    taken = [near_cpus(f"0000:{bus}:00.0", usable, two_sockets) for bus in ("1b", "3b", "43", "9b")]
    assert taken == [{0, 2}, {4, 5}, {6, 7}, {9, 12}]


def test_where_too_few_are_near_workers_stay_on_all(two_sockets: Path) -> None:
    """Five cores for three GPUs, whose two threads count once; one core for one."""
    usable = {0, 1, 2, 3, 4, 16, 9}
    for bus in ("1b", "3b", "43", "9b"):
        assert near_cpus(f"0000:{bus}:00.0", usable, two_sockets) == set()


@pytest.mark.parametrize(("first", "stays"), [(31, True), (25, True), (24, True), (23, True), (16, False), (8, False)])
def test_nobody_gets_less_than_half_of_a_fair_share(tmp_path: Path, first: int, stays: bool) -> None:
    """Eight GPUs, 32 CPUs beside each four, and a mask without the `first` ones: from 24 on the first four GPUs have
    two CPUs each beside them, from 23 on nine together, while a fair share of all is five."""
    buses = [f"0000:{bus:02x}:00.0" for bus in range(8)]
    for index, bus in enumerate(buses):
        device(tmp_path, bus, str(index // 4), "0-31" if index < 4 else "32-63")
    taken = [near_cpus(bus, range(first, 64), tmp_path) for bus in buses]
    assert [len(cpus) for cpus in taken[:4]] == [0 if stays else (32 - first) // 4] * 4
    assert [len(cpus) for cpus in taken[4:]] == [8] * 4
    assert len(set().union(*taken)) == sum(map(len, taken))


def test_nothing_is_known_or_near(two_sockets: Path) -> None:
    device(two_sockets, "0000:c1:00.0", "-1", "0-31")
    assert near_cpus("0000:c1:00.0", range(32), two_sockets) == set()
    assert near_cpus("0000:ee:00.0", range(32), two_sockets) == set()
    assert near_cpus("0000:9b:00.0", range(8), two_sockets) == set()
    assert near_cpus("0000:9b:00.0", range(8), two_sockets / "nowhere") == set()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("numa_node", text) for text in ("", "x", "1.0", "1 1", "9" * 5000, None)),
        *(("local_cpulist", text) for text in ("", "8-15:1/2", "8-", "-8", "a-b", "8,,9", "9" * 5000, None)),
        ("local_cpulist", b"\xff\xfe"),
    ],
)
def test_what_the_kernel_does_not_write_moves_nobody(
    two_sockets: Path, caplog: pytest.LogCaptureFixture, name: str, text: str | bytes | None
) -> None:
    file = two_sockets / "bus" / "pci" / "devices" / "0000:9b:00.0" / name
    if text is None:
        file.unlink()
    else:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with caplog.at_level("DEBUG"):
        assert near_cpus("0000:9b:00.0", range(32), two_sockets) == set()
    (record,) = caplog.records
    assert record.levelname == "DEBUG"
    assert "0000:9b:00.0: CPUs stay as they are: " in record.message
    for bus in ("1b", "3b", "43"):  # what is wrong with one GPU is so for it alone
        assert near_cpus(f"0000:{bus}:00.0", range(32), two_sockets)


def test_a_list_of_far_too_many_cpus(tmp_path: Path) -> None:
    device(tmp_path, "0000:00:05.0", "0", "2-999999999")
    assert near_cpus("0000:00:05.0", range(8), tmp_path) == set(range(2, 8))


def test_a_node_of_one_gpu_without_a_topology(tmp_path: Path) -> None:
    device(tmp_path, "0000:00:05.0", "0", "0-4")
    assert near_cpus("0000:00:05.0", range(8), tmp_path) == {0, 1, 2, 3, 4}


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


HALF_WAY = """
import errno, os, threading
from tokenmill_engine.worker import near_cpus

usable = os.sched_getaffinity(0)
near = {min(usable)}
near_cpus.pci_address = lambda index: "0000:00:05.0"
near_cpus.near_cpus = lambda address, cpus: near
really, hold, here, moved = os.sched_setaffinity, threading.Event(), threading.Barrier(4), []

def wait():
    here.wait()
    hold.wait()

def move(thread, cpus):
    if cpus == near and len(moved) == 3:
        raise OSError(errno.EINVAL, "the control group's CPUs are others now")
    really(thread, cpus)
    if cpus == near:
        moved.append(thread)
        assert os.sched_getaffinity(thread) == near

for _ in range(3):
    threading.Thread(target=wait).start()
here.wait()
before = {task: os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")}
os.sched_setaffinity = move
assert near_cpus.stay_near_gpu(0) == set()
assert len(moved) == 3
print({task: os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")} == before)
hold.set()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="with one CPU there is nowhere to move")
def test_if_one_thread_cannot_move_the_others_come_back() -> None:
    done = subprocess.run([sys.executable, "-c", HALF_WAY], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_without_a_gpu_nothing_moves() -> None:
    before = os.sched_getaffinity(0)
    assert stay_near_gpu(1 << 20) == set()
    assert os.sched_getaffinity(0) == before
