"""Which device this machine offers, found without importing torch: the launcher and its checks stay light.

CUDA is asked through the driver library, so `CUDA_VISIBLE_DEVICES` is honoured as it is by every CUDA program.
"""

import ctypes
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from tokenmill_engine.config.architecture import ArchitectureConfig
from tokenmill_engine.config.engine import DeviceKind, DtypeName
from tokenmill_engine.errors import ConfigError, StartupError

_CUDA_LIBRARIES = ("libcuda.so.1", "libcuda.so")
_CGROUP = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")
_DEVICE_NAME_BYTES, _PCI_ADDRESS_BYTES = 256, 32
_ATTRIBUTE_CAPABILITY_MAJOR, _ATTRIBUTE_CAPABILITY_MINOR = 75, 76
_FIRST_BFLOAT16_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The device that tensors will live on. For the CPU, memory is what this process may use of the machine's."""

    kind: DeviceKind
    name: str
    total_memory_bytes: int
    """Of one device."""
    count: int
    compute_capability: tuple[int, int] | None = None
    """Of a CUDA device: (major, minor)."""


def detect_device(requested: Literal["auto", "cpu", "cuda"] = "auto") -> DeviceInfo:
    """The device to use; `auto` prefers CUDA. Raises StartupError if `cuda` is asked for and there is none."""
    if requested not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device must be auto, cpu or cuda, not {requested!r}")
    if requested != "cpu":
        cuda = _cuda_device()
        if cuda is not None:
            return cuda
        if requested == "cuda":
            raise StartupError(
                "--device cuda: no CUDA device is visible (check nvidia-smi and CUDA_VISIBLE_DEVICES); "
                "--device cpu works without one"
            )
    return DeviceInfo(kind="cpu", name="cpu", total_memory_bytes=host_memory_bytes(), count=1)


def resolve_dtype(
    requested: Literal["auto"] | DtypeName, architecture: ArchitectureConfig, device: DeviceInfo
) -> DtypeName:
    """The compute type. `auto` is bfloat16 whatever the checkpoint holds: float32 ones are too slow to serve as they
    are, float16 ones overflow less. GPUs older than Ampere have no bfloat16 units and take float16, unless the
    checkpoint is bfloat16, whose range float16 cannot hold. Text encoders are small: on a CPU they are float32."""
    if requested != "auto":
        return requested
    if architecture.text_encoder is not None and device.kind == "cpu":
        return "float32"
    has_bfloat16 = device.compute_capability is None or device.compute_capability >= _FIRST_BFLOAT16_CAPABILITY
    if has_bfloat16:
        return "bfloat16"
    return "float32" if architecture.checkpoint_dtype == "bfloat16" else "float16"


def _cuda_device() -> DeviceInfo | None:
    """The first visible CUDA device, or None without a driver or a device."""
    driver = _cuda_driver()
    if driver is None:
        return None
    count, device = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or count.value < 1:
        return None
    name, total = ctypes.create_string_buffer(_DEVICE_NAME_BYTES), ctypes.c_size_t()
    if (
        driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceGetName(name, _DEVICE_NAME_BYTES, device)
        or driver.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    ):
        return None
    return DeviceInfo(
        "cuda", name.value.decode("utf-8", "replace"), total.value, count.value, _capability(driver, device)
    )


def may_have_gpu() -> bool:
    """Whether a GPU is likely, without asking the driver: its library is here, and the user does not hide all GPUs."""
    first_visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()
    return first_visible not in ("", "-1") and _cuda_driver() is not None


def open_cuda_context(index: int = 0) -> None:
    """Starts the driver and makes the context of a visible device, if there is such a one, for the whole process:
    libraries that use the device later find it there. Takes half a second, without Python's lock."""
    driver = _cuda_driver()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver is None or driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index):
        return
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def pci_address(index: int) -> str | None:
    """Of a visible CUDA device, as in /sys/bus/pci/devices; None if there is no such device."""
    driver = _cuda_driver()
    device, address = ctypes.c_int(), ctypes.create_string_buffer(_PCI_ADDRESS_BYTES)
    try:
        if (
            driver is None
            or driver.cuInit(0)
            or driver.cuDeviceGet(ctypes.byref(device), index)
            or driver.cuDeviceGetPCIBusId(address, _PCI_ADDRESS_BYTES, device)
        ):
            return None
    except AttributeError:  # a library that has the driver's name only
        return None
    return address.value.decode("ascii", "replace").lower()


def _cuda_driver() -> ctypes.CDLL | None:
    for library in _CUDA_LIBRARIES:
        try:
            return ctypes.CDLL(library)
        except OSError:
            continue
    return None


def _capability(driver: ctypes.CDLL, device: ctypes.c_int) -> tuple[int, int] | None:
    major, minor = ctypes.c_int(), ctypes.c_int()
    if driver.cuDeviceGetAttribute(ctypes.byref(major), _ATTRIBUTE_CAPABILITY_MAJOR, device):
        return None
    if driver.cuDeviceGetAttribute(ctypes.byref(minor), _ATTRIBUTE_CAPABILITY_MINOR, device):
        return None
    return major.value, minor.value


def host_memory_bytes() -> int:
    """Memory of the machine, or of the control group that this process runs in if that is less."""
    total = int(psutil.virtual_memory().total)
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        limit = _cgroup_value(file)
        if limit is not None and limit.isdigit():
            total = min(total, int(limit))
    return total


def cgroup_available_bytes(root: Path) -> int | None:
    """Memory that the control group under `root` still leaves, or None without a limit. Cached file content that was
    not used lately counts as free: the kernel drops it first."""
    for limit_file, usage_file, stat_file, inactive in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        limit = read_system_file(root / limit_file)
        if limit is None or not limit.isdigit():
            continue
        usage = read_system_file(root / usage_file) or "0"
        stat = dict(
            line.split(" ", 1) for line in (read_system_file(root / stat_file) or "").splitlines() if " " in line
        )
        return max(0, int(limit) - max(0, int(usage) - int(stat.get(inactive, 0))))
    return None


def available_host_bytes() -> int:
    """Memory that this process could still get."""
    available = int(psutil.virtual_memory().available)
    left = cgroup_available_bytes(_CGROUP)
    return available if left is None else min(available, left)


def physical_cores(cpus: Iterable[int], root: Path) -> list[list[int]]:
    """The logical `cpus` by physical core, in ascending order, from the topology under `root`. A CPU without one is a
    core."""
    cores: dict[str, list[int]] = {}
    for cpu in sorted(cpus):
        siblings = read_system_file(root / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu)
        cores.setdefault(siblings, []).append(cpu)
    return list(cores.values())


def cpu_threads() -> int:
    """Threads that compute at full speed: the physical cores of the affinity mask (a second hyperthread adds nothing to
    kernels that keep the vector units or the memory busy), cut to the control group's quota. At least 1."""
    return _within_quota(len(physical_cores(os.sched_getaffinity(0), _CPUS)))


def usable_cpus() -> int:
    """Processes that can run at once: the logical CPUs of the affinity mask, cut to the control group's quota. At
    least 1."""
    return _within_quota(len(os.sched_getaffinity(0)))


def _within_quota(count: int) -> int:
    available = float(count)
    quota = _cgroup_value("cpu.max")
    if quota is not None:
        limit, _, period = quota.partition(" ")
        if limit.isdigit() and period.isdigit():
            available = min(available, int(limit) / int(period))
    else:
        limit = _cgroup_value("cpu/cpu.cfs_quota_us") or ""
        period = _cgroup_value("cpu/cpu.cfs_period_us") or ""
        if limit.isdigit() and period.isdigit():
            available = min(available, int(limit) / int(period))
    return max(1, int(available))


def _cgroup_value(file: str) -> str | None:
    """Content of a control file as a container sees it (version 2 names, or a version 1 controller's folder)."""
    return read_system_file(_CGROUP / file)


def read_system_file(path: Path) -> str | None:
    """Content of a file of the kernel's, or None if there is no such file."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
