"""Weight matrices rearranged for the CPU library. What the arrangement is, only the library knows (csrc/gemm.hpp)."""

import ctypes
import mmap
from contextlib import suppress
from dataclasses import dataclass

import torch

from tokenmill_kernels.cpu.library import DTYPE_CODES, load

_PANEL = 16
_HUGE_PAGE_BYTES = 2 << 20


@dataclass(slots=True, frozen=True)
class PackedWeight:
    """A packed matrix [out_features, in_features], float32 or bfloat16."""

    data: torch.Tensor
    """One dimension, of `packed_size` elements."""
    out_features: int
    in_features: int

    @property
    def shape(self) -> tuple[int, int]:
        return (self.out_features, self.in_features)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype


def packed_size(out_features: int, in_features: int) -> int:
    """Elements of a packed matrix: output features are padded to whole panels."""
    return -(-out_features // _PANEL) * _PANEL * in_features


def can_pack(dtype: torch.dtype, in_features: int) -> bool:
    """Whether the library is there and takes matrices of this type and width."""
    return dtype in DTYPE_CODES and in_features * dtype.itemsize % 4 == 0 and load() is not None


def pack(weight: torch.Tensor) -> PackedWeight:
    """Copies weight [out_features, in_features] to packed form. `can_pack` must hold."""
    out_features, in_features = weight.shape
    data = allocate(packed_size(out_features, in_features), weight.dtype)
    pack_into(data, weight)
    return PackedWeight(data, out_features, in_features)


def pack_into(data: torch.Tensor, weight: torch.Tensor, first_panel: int = 0, panel_step: int = 1) -> None:
    """Packs `weight` into the zeroed `data`, its i-th panel of 16 features at panel first_panel + i * panel_step."""
    library = load()
    assert library is not None
    weight = weight.detach()
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    library.tokenmill_pack(
        DTYPE_CODES[weight.dtype],
        weight.data_ptr(),
        weight.stride(0),
        weight.shape[0],
        weight.shape[1],
        first_panel,
        panel_step,
        data.data_ptr(),
    )


def allocate(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeroed memory for weights that are read over and over: in huge pages where the system has them."""
    num_bytes = size * dtype.itemsize
    if num_bytes < 2 * _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages says so; ordinary ones do as well, only slower
        memory.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return torch.frombuffer(memory, dtype=dtype, count=size, offset=-address % _HUGE_PAGE_BYTES)
