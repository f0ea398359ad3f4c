"""Tile sizes of the attention kernels: by head size, dtype and what the device has."""

from dataclasses import dataclass

import torch
import triton

from tokenmill_kernels.gpu.launch import device_limits

MIN_DOT_SIZE = 16
"""The smallest side of a tile product."""

_AMPLE_SHARED_MEMORY = 160 * 1024
_DECODE_TILE_BYTES = 16384
_FEW_REQUESTS = 48
_FAST_MEMORY = 4e12
"""Bytes per second. Of the cards that were measured H200 has more, H100 less."""


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Tile sizes and launch parameters of one kernel."""

    block_m: int
    """Query rows of a tile (prefill only)."""
    block_n: int
    """Keys of a tile."""
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    """Programs of the launch for each multiprocessor."""


_FEW_ON_FAST_MEMORY = TileConfig(block_m=MIN_DOT_SIZE, block_n=128, num_warps=4, num_stages=5)
_MANY_ON_FAST_MEMORY = TileConfig(block_m=MIN_DOT_SIZE, block_n=64, num_warps=8, num_stages=5, programs_per_sm=2)
"""Of heads of 128 in 16 bits. Fewer programs there, which cut fewer heads, keep the memory as busy."""


def dim_block(head_dim: int) -> int:
    """Head dimension of a tile, padded to what a tile product takes."""
    block: int = max(triton.next_power_of_2(head_dim), MIN_DOT_SIZE)
    return block


def decode_config(head_dim: int, dtype: torch.dtype, num_requests: int, device: torch.device) -> TileConfig:
    """Tiles of the decode launch: 16 KB of keys and as much of values, some of each in flight (the block table takes
    the other stages), so that two or three programs share a multiprocessor with 228 KB of memory. Two are faster while
    most heads fit into one round, three where there are many and memory is not fast."""
    bytes_per_key = dim_block(head_dim) * dtype.itemsize
    limits = device_limits(device)
    ample = limits.shared_memory_bytes >= _AMPLE_SHARED_MEMORY
    few, fast = num_requests <= _FEW_REQUESTS, limits.memory_bandwidth >= _FAST_MEMORY
    if ample and fast and (dim_block(head_dim), dtype.itemsize) == (128, 2):
        return _FEW_ON_FAST_MEMORY if few else _MANY_ON_FAST_MEMORY
    return TileConfig(
        block_m=MIN_DOT_SIZE,
        block_n=min(max(_DECODE_TILE_BYTES // bytes_per_key, 16), 128),
        num_warps=4,
        num_stages=6 if ample and few else 5,
        programs_per_sm=(2 if few or fast else 3) if ample else 1,
    )


def prefill_config(head_dim: int, dtype: torch.dtype, rows: int, device: torch.device) -> TileConfig:
    """Tiles of the prefill launch for requests of at most `rows` query rows (tokens times heads of a group)."""
    ample = device_limits(device).shared_memory_bytes >= _AMPLE_SHARED_MEMORY
    wide = head_dim > 128
    if dtype == torch.float32:
        block = 16 if wide else 32
        return TileConfig(block_m=block, block_n=block, num_warps=4, num_stages=2)
    if wide:
        return TileConfig(block_m=128 if ample and rows > 64 else 64, block_n=32, num_warps=8, num_stages=2)
    if rows <= 64 or not ample:
        return TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=3, programs_per_sm=2)
    return TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)
