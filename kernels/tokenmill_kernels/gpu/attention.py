"""Paged attention for any mix of decodes and prefill chunks: choice of tiles and grids, and the launches.

Grids follow from padded sizes and from the device; everything else is read on the device, so the launches can be
captured in a CUDA graph and replayed with other lengths.
"""

from dataclasses import dataclass

import torch
import triton

from tokenmill_kernels.gpu.attention_decode import decode_kernel, merge_kernel
from tokenmill_kernels.gpu.attention_plan import AttentionPlan
from tokenmill_kernels.gpu.attention_prefill import prefill_kernel
from tokenmill_kernels.gpu.launch import COMPILE_OPTIONS, device_limits

_MIN_DOT_SIZE = 16
_RUNS_AT_ONCE = 16
_AMPLE_SHARED_MEMORY = 160 * 1024
_DECODE_TILE_BYTES = 16384


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
    """Programs of the decode launch for each multiprocessor."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """What `paged_attention` was asked to do, apart from q and out."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    num_decodes: int
    max_query_len: int
    scale: float
    window: int
    soft_cap: float | None

    def precision(self) -> str:
        """float32 products are split in three, which keeps float32 accuracy on the matrix units."""
        return "tf32x3" if self.k_cache.dtype == torch.float32 else "ieee"


def _dim_block(head_dim: int) -> int:
    """Head dimension of a tile, padded to what a tile product takes."""
    block: int = max(triton.next_power_of_2(head_dim), _MIN_DOT_SIZE)
    return block


def decode_config(head_dim: int, dtype: torch.dtype, device: torch.device) -> TileConfig:
    """Tiles of the decode launch: 16 KB of keys and as much of values, two of each in flight (the block table takes
    the other stages), so that three programs share a multiprocessor with 228 KB of memory."""
    bytes_per_key = _dim_block(head_dim) * dtype.itemsize
    ample = device_limits(device).shared_memory_bytes >= _AMPLE_SHARED_MEMORY
    return TileConfig(
        block_m=_MIN_DOT_SIZE,
        block_n=min(max(_DECODE_TILE_BYTES // bytes_per_key, 16), 128),
        num_warps=4,
        num_stages=5,
        programs_per_sm=3 if ample else 1,
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
        return TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)
    return TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)


def plan_attention(
    *,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_tokens: int,
    num_decodes: int,
    max_query_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
) -> AttentionPlan:
    """As `tokenmill_kernels.ops.plan_attention`."""
    del query_start_loc, seq_lens, num_tokens, num_decodes, max_query_len
    del num_heads, num_kv_heads, head_dim, block_size, dtype
    return AttentionPlan(window or 0)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    num_decodes: int,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    out: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> torch.Tensor:
    """As `tokenmill_kernels.ops.paged_attention`.

    With `num_decodes` > 0 every request with one new token, wherever it stands, is a decode; the number itself only
    bounds the prefill grid. So a graph captured with num_decodes = R serves batches of decodes (padded with requests
    of length 0), and one captured with num_decodes = 1 serves any mix up to its `max_query_len`. Lengths are read on
    the device, so `max_seq_len` is not needed.
    """
    del max_seq_len, plan
    if out is None:
        out = torch.empty_like(q)
    assert q.stride(2) == out.stride(2) == k_cache.stride(3) == block_tables.stride(1) == 1
    assert k_cache.stride() == v_cache.stride()
    batch = _Batch(
        k_cache, v_cache, query_start_loc, seq_lens, block_tables, num_decodes, max_query_len, scale, window or 0,
        soft_cap,
    )  # fmt: skip
    if num_decodes > 0:
        _decode(out, q, batch)
    if num_decodes < seq_lens.shape[0]:
        _prefill(out, q, batch)
    return out


def _decode(out: torch.Tensor, q: torch.Tensor, batch: _Batch) -> None:
    """Writes the rows of all requests with exactly one new token."""
    _, num_heads, head_dim = q.shape
    num_requests, num_kv_heads = batch.seq_lens.shape[0], batch.k_cache.shape[2]
    group = num_heads // num_kv_heads
    config = decode_config(head_dim, q.dtype, q.device)
    num_programs = device_limits(q.device).num_sms * config.programs_per_sm
    partials = torch.empty((2 * num_programs, group, head_dim), dtype=torch.float32, device=q.device)
    stats = torch.empty((2 * num_programs, group, 2), dtype=torch.float32, device=q.device)
    dim_block = _dim_block(head_dim)
    decode_kernel[(num_programs,)](
        out, partials, stats, q, batch.k_cache, batch.v_cache, batch.query_start_loc, batch.seq_lens,
        batch.block_tables, num_requests, batch.scale, batch.soft_cap, q.stride(0), q.stride(1), out.stride(0),
        out.stride(1), *batch.k_cache.stride()[:3], batch.block_tables.stride(0),
        num_kv_heads=num_kv_heads,
        group=group,
        group_block=max(triton.next_power_of_2(group), _MIN_DOT_SIZE),
        head_dim=head_dim,
        dim_block=dim_block,
        block_n=config.block_n,
        block_size=batch.k_cache.shape[1],
        window=batch.window,
        precision=batch.precision(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **COMPILE_OPTIONS,
    )  # fmt: skip
    merge_kernel[(num_programs, group)](
        out, partials, stats, batch.query_start_loc, batch.seq_lens, num_requests, out.stride(0), out.stride(1),
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        dim_block=dim_block,
        block_n=config.block_n,
        window=batch.window,
        runs_at_once=_RUNS_AT_ONCE,
        num_warps=4,
        **COMPILE_OPTIONS,
    )  # fmt: skip


def _prefill(out: torch.Tensor, q: torch.Tensor, batch: _Batch) -> None:
    """Writes the rows of all requests that `_decode` leaves."""
    num_tokens, num_heads, head_dim = q.shape
    num_requests, num_kv_heads = batch.seq_lens.shape[0], batch.k_cache.shape[2]
    group = num_heads // num_kv_heads
    config = prefill_config(head_dim, q.dtype, batch.max_query_len * group, q.device)
    block_m = max(config.block_m, triton.next_power_of_2(group))
    queries = block_m // group
    other_decodes = max(batch.num_decodes - 1, 0)
    most_requests = num_requests - other_decodes
    most_tiles = (num_tokens - other_decodes + most_requests * (queries - 1)) // queries
    grid = (min(most_tiles, most_requests * triton.cdiv(batch.max_query_len, queries)), num_kv_heads)
    prefill_kernel[grid](
        out, q, batch.k_cache, batch.v_cache, batch.query_start_loc, batch.seq_lens, batch.block_tables,
        num_requests, 2 if batch.num_decodes > 0 else 1, batch.scale, batch.soft_cap, q.stride(0), q.stride(1),
        out.stride(0), out.stride(1), *batch.k_cache.stride()[:3], batch.block_tables.stride(0),
        group=group,
        head_dim=head_dim,
        dim_block=_dim_block(head_dim),
        block_m=block_m,
        block_n=config.block_n,
        block_size=batch.k_cache.shape[1],
        window=batch.window,
        precision=batch.precision(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **COMPILE_OPTIONS,
    )  # fmt: skip
