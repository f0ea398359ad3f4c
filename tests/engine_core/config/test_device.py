"""Finding the device and its limits without torch."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.tiny_models import tiny_config
from tokenmill_engine.config.device import (
    DeviceInfo,
    available_host_bytes,
    cgroup_available_bytes,
    cpu_threads,
    detect_device,
    host_memory_bytes,
    physical_cores,
    resolve_dtype,
    usable_cpus,
)
from tokenmill_engine.config.hf_folder import parse_architecture
from tokenmill_engine.errors import ConfigError, StartupError


def test_the_cpu_is_described() -> None:
    device = detect_device("cpu")
    assert (device.kind, device.count) == ("cpu", 1)
    assert 0 < device.total_memory_bytes <= psutil.virtual_memory().total


def test_threads_follow_the_affinity_mask() -> None:
    before = os.sched_getaffinity(0)
    assert 1 <= cpu_threads() <= len(before)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert cpu_threads() == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("files", "threads"),
    [
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({}, 8),
    ],
)
def test_threads_follow_the_container_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], threads: int
) -> None:
    _write_cgroup(tmp_path, monkeypatch, files)
    monkeypatch.setattr("tokenmill_engine.config.device._CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert cpu_threads() == threads
    assert usable_cpus() == threads


def test_hyperthreads_of_a_core_count_once(tmp_path: Path) -> None:
    for cpu in range(8):
        file = tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        file.parent.mkdir(parents=True)
        file.write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert physical_cores(range(8), tmp_path) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert physical_cores({0, 4}, tmp_path) == [[0, 4]]
    assert physical_cores({1, 2, 6}, tmp_path) == [[1], [2, 6]]
    assert physical_cores({1, 20, 21}, tmp_path) == [[1], [20], [21]]


V1 = {
    "memory/memory.limit_in_bytes": "1000000",
    "memory/memory.usage_in_bytes": "700000",
    "memory/memory.stat": "inactive_file 7\ntotal_inactive_file 50000\ntotal_active_file 1",
}
V2 = {"memory.max": "1000000", "memory.current": "700000", "memory.stat": "anon 600000\ninactive_file 50000"}


@pytest.mark.parametrize(
    ("files", "available"),
    [
        (V1, 350_000),
        (V2, 350_000),
        (V2 | {"memory.current": "1200000"}, 0),
        (V2 | {"memory.stat": "inactive_file 900000"}, 1_000_000),
        ({"memory.max": "1000000"}, 1_000_000),
        (V2 | {"memory.max": "max"}, None),
        ({}, None),
    ],
)
def test_memory_left_in_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], available: int | None
) -> None:
    _write_cgroup(tmp_path, monkeypatch, files)
    assert cgroup_available_bytes(tmp_path) == available
    if available is None:
        assert 0 < available_host_bytes() <= psutil.virtual_memory().total
    else:
        assert available_host_bytes() == available


@pytest.mark.parametrize("file", ["memory.max", "memory/memory.limit_in_bytes"])
def test_memory_follows_the_container_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    _write_cgroup(tmp_path, monkeypatch, {file: str(2**30)})
    assert host_memory_bytes() == 2**30
    _write_cgroup(tmp_path, monkeypatch, {file: "max"})
    assert host_memory_bytes() == psutil.virtual_memory().total


def test_an_invisible_gpu_is_a_readable_error() -> None:
    """In a process of its own: the driver reads the variable once."""
    program = (
        "from tokenmill_engine.config.device import detect_device\n"
        "import sys\n"
        "assert detect_device('auto').kind == 'cpu'\n"
        "try:\n    detect_device('cuda')\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{StartupError.__name__} --device cuda: no CUDA device is visible")


def test_other_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be auto, cpu or cuda, not 'tpu'"):
        detect_device("tpu")  # type: ignore[arg-type]


def test_auto_is_a_16_bit_type_that_the_device_computes() -> None:
    cpu = DeviceInfo("cpu", "cpu", 1, 1)
    hopper = DeviceInfo("cuda", "H100", 1, 1, (9, 0))
    turing = DeviceInfo("cuda", "T4", 1, 1, (7, 5))
    chosen = {
        (checkpoint, device.name): resolve_dtype(
            "auto", parse_architecture(tiny_config("llama", torch_dtype=checkpoint), "config.json"), device
        )
        for checkpoint in ("float32", "float16", "bfloat16")
        for device in (cpu, hopper, turing)
    }
    assert {dtype for (_, name), dtype in chosen.items() if name != "T4"} == {"bfloat16"}
    assert [chosen[checkpoint, "T4"] for checkpoint in ("float32", "float16", "bfloat16")] == [
        "float16",
        "float16",
        "float32",
    ]


def test_an_explicit_type_is_kept() -> None:
    architecture = parse_architecture(tiny_config("llama"), "config.json")
    for name in ("float32", "float16", "bfloat16"):
        assert resolve_dtype(name, architecture, DeviceInfo("cuda", "T4", 1, 1, (7, 5))) == name


def _write_cgroup(folder: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content + "\n")
    monkeypatch.setattr("tokenmill_engine.config.device._CGROUP", folder)
