"""NCCL by its C interface: each call is one kernel on the current stream and nothing else.

Torch's own way to NCCL (ProcessGroupNCCL) has a stream of its own, threads that look at the events of every call, and
timeouts that end processes; all of that has to be kept away from graphs that are captured. Here a captured call is the
kernel alone, and a member that is gone is the engine core's affair, which ends the others. The library is the one that
torch has loaded.
"""

import ctypes
import os
from functools import cache
from typing import Any, Final

import torch

from tokenmill_engine.errors import ExchangeError, StartupError

ID_BYTES: Final = 128
_LIBRARY = "libnccl.so.2"
_SUM = 0
_DTYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_SETTINGS = {
    # Members of one host meet at an address that no other machine reaches.
    "NCCL_SOCKET_IFNAME": "=lo",
    # Its monitor, which anybody on this machine can ask, is of no use to us.
    "NCCL_RAS_ENABLE": "0",
    # Graphs share their memory and are captured anew: NCCL need not tell its peers of each buffer.
    "NCCL_GRAPH_REGISTER": "0",
    # A stage's message may wait for the next stage: it must not hold many multiprocessors meanwhile.
    "NCCL_MAX_P2P_NCHANNELS": "8",
}
"""Where the environment says nothing else."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


@cache
def _nccl() -> ctypes.CDLL:
    """Raises StartupError if there is no NCCL."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise StartupError(f"workers on GPUs talk through NCCL, which cannot be loaded: {error}") from error
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for name, arguments in {
        "ncclGetUniqueId": (ctypes.POINTER(_UniqueId),),
        "ncclCommInitRank": (ctypes.POINTER(pointer), number, _UniqueId, number),
        "ncclAllReduce": (pointer, pointer, size, number, number, pointer, pointer),
        "ncclAllGather": (pointer, pointer, size, number, pointer, pointer),
        "ncclSend": (pointer, size, number, number, pointer, pointer),
        "ncclRecv": (pointer, size, number, number, pointer, pointer),
    }.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, number
    library.ncclGetErrorString.argtypes, library.ncclGetErrorString.restype = (number,), ctypes.c_char_p
    return library


def new_id() -> bytes:
    """By which the members of one new communicator know each other: one of them makes it. Raises StartupError."""
    unique_id = _UniqueId()
    fault = _fault(_nccl().ncclGetUniqueId(ctypes.byref(unique_id)))
    if fault is not None:
        raise StartupError(f"NCCL cannot be used: {fault}")
    return bytes(unique_id)


class Communicator:
    """One member's view. All members make the same calls in the same order. Calls only enqueue, on the current stream,
    and may be captured; those of one communicator must not run beside each other. Tensors have no gaps."""

    def __init__(self, rank: int, size: int, device: torch.device, unique_id: bytes) -> None:
        """Waits for the others. `device` is the current one of the calling thread.

        Raises:
            StartupError: NCCL refuses.
        """
        self._device = device
        self._handle = ctypes.c_void_p()
        library = _nccl()
        result = library.ncclCommInitRank(ctypes.byref(self._handle), size, _UniqueId.from_buffer_copy(unique_id), rank)
        fault = _fault(result)
        if fault is not None:
            raise StartupError(f"NCCL cannot connect {device} to the other GPUs: {fault}; NCCL_DEBUG=WARN tells more")

    def all_reduce(self, x: torch.Tensor) -> None:
        """`x` becomes the sum of all members' x."""
        self._call(_nccl().ncclAllReduce, x.data_ptr(), x.data_ptr(), x.numel(), _DTYPES[x.dtype], _SUM)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """`out` takes all members' x one after another, by rank."""
        self._call(_nccl().ncclAllGather, x.data_ptr(), out.data_ptr(), x.numel(), _DTYPES[x.dtype])

    def send(self, x: torch.Tensor, rank: int) -> None:
        """To one member, which calls `receive`."""
        self._call(_nccl().ncclSend, x.data_ptr(), x.numel(), _DTYPES[x.dtype], rank)

    def receive(self, out: torch.Tensor, rank: int) -> None:
        """Fills `out` with what one member sends."""
        self._call(_nccl().ncclRecv, out.data_ptr(), out.numel(), _DTYPES[out.dtype], rank)

    def _call(self, function: Any, *arguments: int) -> None:
        fault = _fault(function(*arguments, self._handle, torch.cuda.current_stream(self._device).cuda_stream))
        if fault is not None:
            raise ExchangeError(f"NCCL failed on {self._device}: {fault}")


def _fault(result: int) -> str | None:
    if result == 0:
        return None
    text: bytes = _nccl().ncclGetErrorString(result)
    return text.decode("utf-8", "replace")
