"""Memory of each member of a group that all of them map: of GPUs of one host through CUDA's handles between processes,
on CPUs through files without a name.

Nothing outlives the processes: the driver, or the kernel, frees memory when the last one that maps it ends.
"""

import ctypes
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Exchange = Callable[[bytes], list[bytes]]
"""Gathers bytes of all members of a group, as many from each, by rank."""

_GRANULE = 2 << 20
"""Memory is taken in multiples of this: what is smaller would share a piece with other allocations."""
_MAX_PROBLEM_BYTES = 200
_ENABLE_PEER_ACCESS = 1
_UUID_BYTES = 48
_HANDLE_BYTES = 64


class PeerMemoryError(Exception):
    """Members cannot map each other's memory. The message is one line."""


_REASONS = (PeerMemoryError, OSError, RuntimeError)
"""What taking and mapping memory raises."""


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """As one member sees it. Mapped as long as the process lives."""

    own: torch.Tensor
    """uint8: this member's part."""
    addresses: torch.Tensor
    """int64 [size], on the device: where the parts of all members, by rank, are mapped in this process."""
    mappings: object
    """What must live as long."""


def share_memory(
    num_bytes: int, fill: int, rank: int, size: int, device: torch.device, exchange: Exchange
) -> PeerMemory:
    """Take `num_bytes` on every member's device, all bytes `fill`, and map what the others took. Every member calls it;
    when it returns, all memory is filled.

    Raises:
        PeerMemoryError: on all members alike, if there is none on one of them, or one cannot map what others took.
    """
    kind = _CudaMapper if device.type == "cuda" else _FileMapper
    mapper, own, offer, problem = None, None, b"", ""
    try:
        mapper = kind(device)
        own, offer = mapper.take(-(-num_bytes // _GRANULE) * _GRANULE)
        own.fill_(fill)
        _settle(device)
    except _REASONS as error:
        problem = _one_line(error)
    try:
        offers = exchange(offer.ljust(kind.offer_bytes, b"\0"))
        _agree(problem, exchange)
        assert mapper is not None
        assert own is not None
        pointers = [own.data_ptr()] * size
        try:
            for other in range(size):
                if other != rank:
                    pointers[other] = mapper.map(offers[other], own.numel())
        except _REASONS as error:
            problem = _one_line(error)
        _agree(problem, exchange)
    finally:
        if mapper is not None:
            mapper.withdraw()
    addresses = torch.tensor(pointers, dtype=torch.int64, device=device)
    _settle(device)
    return PeerMemory(own[:num_bytes], addresses, mapper)


def _settle(device: torch.device) -> None:
    """What was enqueued is done, for other streams and other members."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _agree(problem: str, exchange: Exchange) -> None:
    """Raises PeerMemoryError on all members if one has a problem, the same on each."""
    told = exchange(problem.encode()[:_MAX_PROBLEM_BYTES].ljust(_MAX_PROBLEM_BYTES, b"\0"))
    for rank, text in enumerate(told):
        if found := text.rstrip(b"\0").decode(errors="replace"):
            raise PeerMemoryError(f"worker {rank}: {found}")


def _one_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


class _FileMapper:
    """Files in memory without a name, which others open through the process that made them."""

    offer_bytes = struct.calcsize("qq")

    def __init__(self, device: torch.device) -> None:
        self._file: int | None = None
        self._mapped: list[torch.Tensor] = []

    def take(self, num_bytes: int) -> tuple[torch.Tensor, bytes]:
        """(the memory, what others need to map it)."""
        self._file = os.memfd_create("tokenmill-peers")
        os.ftruncate(self._file, num_bytes)
        return self._map(self._file, num_bytes), struct.pack("qq", os.getpid(), self._file)

    def map(self, offer: bytes, num_bytes: int) -> int:
        """Where what another member took begins here."""
        pid, number = struct.unpack("qq", offer)
        file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        try:
            return self._map(file, num_bytes).data_ptr()
        finally:
            os.close(file)

    def withdraw(self) -> None:
        """All have mapped what they will."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _map(self, file: int, num_bytes: int) -> torch.Tensor:
        self._mapped.append(torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8))
        return self._mapped[-1]


class _CudaMapper:
    """Allocations of the driver, not of torch, whose allocator would put others beside them."""

    offer_bytes = _UUID_BYTES + _HANDLE_BYTES

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._driver: Any = ctypes.CDLL("libcuda.so.1")

    def take(self, num_bytes: int) -> tuple[torch.Tensor, bytes]:
        with torch.cuda.device(self._device):
            torch.cuda.current_stream().synchronize()  # so that there is a context
            pointer, handle = ctypes.c_uint64(), _Handle()
            self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
        own = torch.as_tensor(_CudaArray(pointer.value, num_bytes), device=self._device)
        assert own.data_ptr() == pointer.value
        return own, _uuid(self._device.index) + bytes(handle)

    def map(self, offer: bytes, num_bytes: int) -> int:
        self._check_access(offer[:_UUID_BYTES])
        pointer, handle = ctypes.c_uint64(), _Handle.from_buffer_copy(offer[_UUID_BYTES:])
        with torch.cuda.device(self._device):
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), handle, ctypes.c_uint(_ENABLE_PEER_ACCESS))
        return pointer.value

    def withdraw(self) -> None:
        """Handles need no file."""

    def _check_access(self, uuid: bytes) -> None:
        """Of what is not visible here the driver will say what is wrong."""
        for other in range(torch.cuda.device_count()):
            if (
                other != self._device.index
                and _uuid(other) == uuid
                and not torch.cuda.can_device_access_peer(self._device, other)
            ):
                raise PeerMemoryError(f"GPU {self._device.index} cannot access the memory of GPU {other}")

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(text))
            raise PeerMemoryError(f"{name}: {text.value.decode() if text.value else f'error {status}'}")


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class _CudaArray:
    """Bytes on a GPU, for torch."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (pointer, False), "strides": None, "version": 3,
        }  # fmt: skip


def _uuid(index: int) -> bytes:
    return str(torch.cuda.get_device_properties(index).uuid).encode()[:_UUID_BYTES].ljust(_UUID_BYTES, b"\0")
