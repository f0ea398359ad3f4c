"""Paged attention for any mix of decodes and prefill chunks: plans, and the two launches that read them.

Grids follow from padded sizes and from the device; everything else is read on the device, so the launches can be
captured in a CUDA graph and replayed with other lengths.
"""

import logging
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
import triton
from triton.errors import TritonError

from tokenmill_kernels.gpu import attention_planner, compilation
from tokenmill_kernels.gpu.attention_decode import decode_kernel, merge_kernel
from tokenmill_kernels.gpu.attention_plan import AttentionPlan, DecodePlan, PrefillPlan
from tokenmill_kernels.gpu.attention_prefill import prefill_kernel
from tokenmill_kernels.gpu.attention_tiles import MIN_DOT_SIZE, TileConfig, decode_config, dim_block, prefill_config
from tokenmill_kernels.gpu.launch import device_limits, launch_options

logger = logging.getLogger(__name__)

_RUNS_AT_ONCE = 16
_MERGE_WARPS = 1


@dataclass(frozen=True, slots=True)
class _Batch:
    """What `paged_attention` was asked to do, apart from q and out."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    max_query_len: int
    scale: float
    v_scale: float
    scales: tuple[torch.Tensor | None, torch.Tensor | None, int]
    """Scales of keys and of values on the device (or None), and their stride over heads."""
    window: int
    soft_cap: float | None


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
    dtype: torch.dtype,
    window: int | None,
) -> AttentionPlan:
    """As `tokenmill_kernels.ops.plan_attention`.

    With `num_decodes` > 0 every request with one new token, wherever it stands, is a decode; the number itself only
    bounds the list of tiles. So a graph captured with num_decodes = R serves batches of decodes (padded with requests
    of length 0), and one captured with num_decodes = 1 serves any mix up to its `max_query_len`.
    """
    device, num_requests, group = seq_lens.device, seq_lens.shape[0], num_heads // num_kv_heads
    decode, prefill = None, None
    if num_decodes > 0:
        tiles = decode_config(head_dim, dtype, num_requests, device)
        num_programs = device_limits(device).num_sms * tiles.programs_per_sm
        decode = DecodePlan(
            tiles.block_n,
            torch.empty((num_programs, attention_planner.RUN_FIELDS.value), dtype=torch.int32, device=device),
            torch.empty((2 * num_programs, group, head_dim), dtype=torch.float32, device=device),
            torch.empty((2 * num_programs, group, 2), dtype=torch.float32, device=device),
        )
    if num_decodes < num_requests:
        tiles = _prefill_tiles(head_dim, dtype, group, max_query_len, device)
        queries = tiles.block_m // group
        other_decodes = max(num_decodes - 1, 0)
        most_requests = num_requests - other_decodes
        most_tiles = (num_tokens - other_decodes + most_requests * (queries - 1)) // queries
        most_tiles = max(min(most_tiles, most_requests * triton.cdiv(max_query_len, queries)), 1)
        prefill = PrefillPlan(
            queries,
            torch.empty((most_tiles, 2), dtype=torch.int32, device=device),
            torch.empty(2, dtype=torch.int32, device=device),
        )
    if decode is not None or prefill is not None:
        attention_planner.launch(decode, prefill, query_start_loc, seq_lens, num_kv_heads, window or 0)
    return AttentionPlan(window or 0, decode, prefill)


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
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> torch.Tensor:
    """As `tokenmill_kernels.ops.paged_attention`.

    A `plan` that is given must have been made at least two launches ago: the decode kernel reads it before it waits
    for the launch right before it. Lengths are read on the device, so `max_seq_len` is not needed.
    """
    del max_seq_len
    if out is None:
        out = torch.empty_like(q)
    assert q.stride(2) == out.stride(2) == k_cache.stride(3) == block_tables.stride(1) == 1
    assert k_cache.stride() == v_cache.stride()
    early = plan is not None
    if plan is None:
        plan = plan_attention(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            num_tokens=q.shape[0],
            num_decodes=num_decodes,
            max_query_len=max_query_len,
            num_heads=q.shape[1],
            num_kv_heads=k_cache.shape[2],
            head_dim=q.shape[2],
            dtype=q.dtype,
            window=window,
        )
    assert plan.window == (window or 0)
    k_factor, v_factor, scales = _split_scales(k_scale, v_scale)
    batch = _Batch(
        k_cache, v_cache, query_start_loc, seq_lens, block_tables, max_query_len, scale * k_factor, v_factor, scales,
        plan.window, soft_cap,
    )  # fmt: skip
    if plan.decode is not None:
        _decode(out, q, batch, plan.decode, early)
    if plan.prefill is not None:
        _prefill(out, q, batch, plan.prefill)
    return out


def _split_scales(
    k_scale: float | torch.Tensor | None, v_scale: float | torch.Tensor | None
) -> tuple[float, float, tuple[torch.Tensor | None, torch.Tensor | None, int]]:
    """(factor of keys, factor of values, (tensor of keys, tensor of values, stride over heads))"""
    tensors = [scale if isinstance(scale, torch.Tensor) else None for scale in (k_scale, v_scale)]
    factors = [scale if isinstance(scale, float | int) else 1.0 for scale in (k_scale, v_scale)]
    sizes = {tensor.numel() for tensor in tensors if tensor is not None}
    assert len(sizes) <= 1, "scales of keys and of values are both per tensor or both per head"
    return factors[0], factors[1], (tensors[0], tensors[1], int(max(sizes, default=1) > 1))


def _prefill_tiles(
    head_dim: int, dtype: torch.dtype, group: int, max_query_len: int, device: torch.device
) -> TileConfig:
    """Tiles of the prefill launch, with room for a whole group of heads."""
    tiles = prefill_config(head_dim, dtype, max_query_len * group, device)
    rows = max(tiles.block_m, triton.next_power_of_2(group))
    return TileConfig(rows, tiles.block_n, tiles.num_warps, tiles.num_stages, tiles.programs_per_sm)


def _precision(dtype: torch.dtype) -> str:
    """float32 products are split in three, which keeps float32 accuracy on the matrix units."""
    return "tf32x3" if dtype == torch.float32 else "ieee"


def _decode(out: torch.Tensor, q: torch.Tensor, batch: _Batch, plan: DecodePlan, early: bool) -> None:
    """Writes the rows of all requests with exactly one new token."""
    _, num_heads, head_dim = q.shape
    num_kv_heads = batch.k_cache.shape[2]
    group = num_heads // num_kv_heads
    tiles = decode_config(head_dim, q.dtype, batch.seq_lens.shape[0], q.device)
    num_programs = plan.runs.shape[0]
    decode_kernel[(num_programs,)](
        out, plan.partials, plan.stats, plan.runs, q, batch.k_cache, batch.v_cache,
        batch.query_start_loc, batch.seq_lens, batch.block_tables, batch.seq_lens.shape[0], batch.scale,
        batch.v_scale, *batch.scales, batch.soft_cap, q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        *batch.k_cache.stride()[:3], batch.block_tables.stride(0),
        num_kv_heads=num_kv_heads,
        group=group,
        group_block=max(triton.next_power_of_2(group), MIN_DOT_SIZE),
        head_dim=head_dim,
        dim_block=dim_block(head_dim),
        block_n=plan.block_n,
        block_size=batch.k_cache.shape[1],
        window=batch.window,
        precision=_precision(q.dtype),
        early=early,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **launch_options(q.device),
    )  # fmt: skip
    merge_kernel[(num_programs, group)](
        out, plan.partials, plan.stats, plan.runs, out.stride(0), out.stride(1),
        group=group,
        head_dim=head_dim,
        dim_block=dim_block(head_dim),
        runs_at_once=_RUNS_AT_ONCE,
        num_warps=_MERGE_WARPS,
        **launch_options(q.device),
    )  # fmt: skip


class HopperPrefill:
    """The prefill kernel for Hopper, as long as the Triton that is installed can compile it."""

    def __init__(self) -> None:
        self.module: ModuleType | None = None
        """None: the portable kernel serves."""
        try:
            from tokenmill_kernels.gpu import attention_prefill_hopper
        except (ImportError, AttributeError) as error:
            self._warn(error)
            return
        self.module = attention_prefill_hopper
        compilation.allow_to_fail(attention_prefill_hopper.hopper_prefill_kernel, self.give_up)

    def give_up(self, reason: Exception) -> None:
        """It does not compile, in one of its variants at least."""
        if self.module is not None:
            self._warn(reason)
        self.module = None

    @staticmethod
    def _warn(reason: Exception) -> None:
        logger.warning(
            "prefill attention is slower than it could be, the kernel for Hopper is of no use with Triton %s: %s",
            triton.__version__,
            reason,
        )


@cache
def _hopper() -> HopperPrefill:
    return HopperPrefill()


def _prefill_on_hopper(out: torch.Tensor, q: torch.Tensor, batch: _Batch, plan: PrefillPlan) -> bool:
    """As `_prefill`, if the device, the arguments and Triton allow it."""
    _, num_heads, head_dim = q.shape
    caches = (batch.k_cache, batch.v_cache)
    module = _hopper().module if q.is_cuda else None
    if (
        module is None
        or not module.supports(head_dim, q.dtype, q.device)
        or not all(module.reads(q, cache) for cache in caches)
        or plan.queries != module.ROWS // (num_heads // caches[0].shape[2])
        or any(scale is not None for scale in batch.scales[:2])
    ):
        return False
    lengths = (batch.query_start_loc, batch.seq_lens, batch.block_tables)
    try:
        module.launch(out, q, caches, plan, lengths, (batch.scale, batch.v_scale), batch.soft_cap, batch.window)
    except (TritonError, RuntimeError) as error:
        failure = compilation.compile_failure(error)
        if failure is None:
            raise
        _hopper().give_up(failure)
        return False
    return True


def _prefill(out: torch.Tensor, q: torch.Tensor, batch: _Batch, plan: PrefillPlan) -> None:
    """Writes the rows of all requests that `_decode` leaves."""
    if _prefill_on_hopper(out, q, batch, plan):
        return
    _, num_heads, head_dim = q.shape
    num_kv_heads = batch.k_cache.shape[2]
    group = num_heads // num_kv_heads
    tiles = _prefill_tiles(head_dim, q.dtype, group, batch.max_query_len, q.device)
    assert plan.queries == tiles.block_m // group
    programs = min(device_limits(q.device).num_sms * tiles.programs_per_sm, plan.tiles.shape[0] * num_kv_heads)
    prefill_kernel[(programs,)](
        out, plan.tiles, plan.num_tiles, q, batch.k_cache, batch.v_cache, batch.query_start_loc, batch.seq_lens,
        batch.block_tables, batch.scale, batch.v_scale, *batch.scales, batch.soft_cap, q.stride(0), q.stride(1),
        out.stride(0), out.stride(1), *batch.k_cache.stride()[:3], batch.block_tables.stride(0),
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        dim_block=dim_block(head_dim),
        block_m=tiles.block_m,
        block_n=tiles.block_n,
        block_size=batch.k_cache.shape[1],
        window=batch.window,
        precision=_precision(q.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **launch_options(q.device),
    )  # fmt: skip
