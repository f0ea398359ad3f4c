"""Rotary embedding of queries and keys, with the optional norm per head before it and the write to the KV cache
after it, in one pass over q, k and v; or the rotation alone, by angles that each row has of its own."""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from tokenmill_kernels.gpu.launch import launch_options, let_dependents_start, wait_for_inputs

_HEADS_PER_PROGRAM = 8
_NUM_WARPS = 4
_LARGEST_E4M3 = tl.constexpr(448.0)


@triton.jit
def _store_cached(cache_ptr, offsets, values, mask, scale, scale_is_pointer: tl.constexpr):
    """Stores what attention multiplies by the scale again: a float, the float32 at a pointer, or None.
    Of the 8-bit types only e4m3 is known; it saturates."""
    dtype = cache_ptr.dtype.element_ty
    if scale is not None:
        inverse = 1.0 / (tl.load(scale) if scale_is_pointer else scale)
        values = values.to(tl.float32) * inverse
    if dtype.is_fp8():
        values = tl.clamp(values.to(tl.float32), -_LARGEST_E4M3, _LARGEST_E4M3, propagate_nan=tl.PropagateNan.ALL)
    tl.store(cache_ptr + offsets, values.to(dtype), mask=mask)


@triton.jit
def _rotate_heads(
    heads_ptr, cache_ptr, scale, scale_is_pointer: tl.constexpr, inside, cached, cos, sin, norm_ptr, eps,
    head_dim: tl.constexpr, half: tl.constexpr, half_block: tl.constexpr, rest_block: tl.constexpr,
):  # fmt: skip
    """Normalises (given `norm_ptr`) and rotates the heads at `heads_ptr` [heads, 1] in place, and writes them to
    `cache_ptr` [heads, 1] (or None) too. The masks `inside` and `cached` are [heads, 1], cos and sin [1, half_block].
    `rest_block` is 0 if all dimensions rotate."""
    dims = tl.arange(0, half_block)[None, :]
    keep = inside & (dims < half)
    dtype = heads_ptr.dtype.element_ty
    first = tl.load(heads_ptr + dims, mask=keep, other=0.0).to(tl.float32)
    second = tl.load(heads_ptr + half + dims, mask=keep, other=0.0).to(tl.float32)
    if rest_block > 0:
        rest_dims = 2 * half + tl.arange(0, rest_block)[None, :]
        keep_rest = inside & (rest_dims < head_dim)
        rest = tl.load(heads_ptr + rest_dims, mask=keep_rest, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        squares = tl.sum(first * first + second * second, axis=1)
        if rest_block > 0:
            squares += tl.sum(rest * rest, axis=1)
        inverse_rms = tl.rsqrt(squares / head_dim + eps)[:, None]
        first *= inverse_rms * tl.load(norm_ptr + dims, mask=dims < half, other=0.0).to(tl.float32)
        second *= inverse_rms * tl.load(norm_ptr + half + dims, mask=dims < half, other=0.0).to(tl.float32)
        if rest_block > 0:
            rest *= inverse_rms * tl.load(norm_ptr + rest_dims, mask=rest_dims < head_dim, other=0.0).to(tl.float32)
            tl.store(heads_ptr + rest_dims, rest.to(dtype), mask=keep_rest)
    rotated_first = (first * cos - second * sin).to(dtype)
    rotated_second = (second * cos + first * sin).to(dtype)
    tl.store(heads_ptr + dims, rotated_first, mask=keep)
    tl.store(heads_ptr + half + dims, rotated_second, mask=keep)
    if cache_ptr is not None:
        keep_cached = cached & (dims < half)
        _store_cached(cache_ptr, dims, rotated_first, keep_cached, scale, scale_is_pointer)
        _store_cached(cache_ptr, half + dims, rotated_second, keep_cached, scale, scale_is_pointer)
        if rest_block > 0:
            keep_rest = cached & (rest_dims < head_dim)
            _store_cached(cache_ptr, rest_dims, rest.to(dtype), keep_rest, scale, scale_is_pointer)


@triton.jit
def _rotary_kv_write_kernel(
    q_ptr, k_ptr, v_ptr, cos_sin_ptr, positions_ptr, slot_mapping_ptr, k_cache_ptr, v_cache_ptr,
    q_norm_ptr, k_norm_ptr, k_scale, v_scale, eps,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    cache_block_stride, cache_token_stride, cache_head_stride, cos_sin_stride,
    block_size: tl.constexpr, num_heads: tl.constexpr, num_kv_heads: tl.constexpr, head_dim: tl.constexpr,
    half: tl.constexpr, half_block: tl.constexpr, rest_block: tl.constexpr, dim_block: tl.constexpr,
    heads_per_program: tl.constexpr, k_scale_is_pointer: tl.constexpr, v_scale_is_pointer: tl.constexpr,
    early: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Token program_id(0); program_id(1) counts groups of query heads, then groups of key/value heads. With `early`
    the position, the slot and the rotation are read before the wait."""
    token = tl.program_id(0).to(tl.int64)
    num_query_groups: tl.constexpr = (num_heads + heads_per_program - 1) // heads_per_program
    group = tl.program_id(1)
    dims = tl.arange(0, half_block)[None, :]
    if not early:
        wait_for_inputs(pdl)
    slot = tl.load(slot_mapping_ptr + token)
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos_ptrs = cos_sin_ptr + position * cos_sin_stride + dims
    cos = tl.load(cos_ptrs, mask=dims < half, other=0.0)
    sin = tl.load(cos_ptrs + half, mask=dims < half, other=0.0)
    if early:
        wait_for_inputs(pdl)
    let_dependents_start(pdl)
    if group < num_query_groups:
        heads = group * heads_per_program + tl.arange(0, heads_per_program)[:, None]
        inside = heads < num_heads
        q_heads = q_ptr + token * q_token_stride + heads * q_head_stride
        _rotate_heads(
            q_heads, None, None, False, inside, inside, cos, sin, q_norm_ptr, eps, head_dim, half, half_block,
            rest_block,
        )  # fmt: skip
    else:
        heads = (group - num_query_groups) * heads_per_program + tl.arange(0, heads_per_program)[:, None]
        inside = heads < num_kv_heads
        cached = heads < tl.where(slot >= 0, num_kv_heads, 0)
        row = slot // block_size * cache_block_stride + slot % block_size * cache_token_stride
        cache_heads = row + heads * cache_head_stride
        k_heads = k_ptr + token * k_token_stride + heads * k_head_stride
        _rotate_heads(
            k_heads, k_cache_ptr + cache_heads, k_scale, k_scale_is_pointer, inside, cached, cos, sin, k_norm_ptr, eps,
            head_dim, half, half_block, rest_block,
        )  # fmt: skip
        v_dims = tl.arange(0, dim_block)[None, :]
        keep = cached & (v_dims < head_dim)
        v = tl.load(v_ptr + token * v_token_stride + heads * v_head_stride + v_dims, mask=keep, other=0.0)
        _store_cached(v_cache_ptr + cache_heads, v_dims, v, keep, v_scale, v_scale_is_pointer)


@triton.jit
def _rotate_rows_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_row_stride, q_head_stride, k_row_stride, k_head_stride, cos_stride, sin_stride,
    num_heads: tl.constexpr, head_dim: tl.constexpr, half: tl.constexpr, half_block: tl.constexpr,
    heads_per_program: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Row program_id(0), a group of heads program_id(1), of q and of k."""
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * heads_per_program + tl.arange(0, heads_per_program)[:, None]
    inside = heads < num_heads
    dims = tl.arange(0, half_block)[None, :]
    cos = tl.load(cos_ptr + row * cos_stride + dims, mask=dims < half, other=0.0)
    sin = tl.load(sin_ptr + row * sin_stride + dims, mask=dims < half, other=0.0)
    _rotate_heads(
        q_ptr + row * q_row_stride + heads * q_head_stride, None, None, False, inside, inside, cos, sin, None, 0.0,
        head_dim, half, half_block, 0,
    )  # fmt: skip
    _rotate_heads(
        k_ptr + row * k_row_stride + heads * k_head_stride, None, None, False, inside, inside, cos, sin, None, 0.0,
        head_dim, half, half_block, 0,
    )  # fmt: skip


def rotate_rows(q: torch.Tensor, k: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
    """As `tokenmill_kernels.ops.rotate_rows`, in place."""
    num_rows, num_heads, head_dim = q.shape
    assert q.shape == k.shape
    assert q.stride(2) == k.stride(2) == cosines.stride(1) == sines.stride(1) == 1
    heads_per_program = min(_HEADS_PER_PROGRAM, triton.next_power_of_2(num_heads))
    _rotate_rows_kernel[(num_rows, triton.cdiv(num_heads, heads_per_program))](
        q, k, cosines, sines, q.stride(0), q.stride(1), k.stride(0), k.stride(1), cosines.stride(0), sines.stride(0),
        num_heads=num_heads,
        head_dim=head_dim,
        half=head_dim // 2,
        half_block=triton.next_power_of_2(head_dim // 2),
        heads_per_program=heads_per_program,
        num_warps=_NUM_WARPS,
        **launch_options(q.device),
    )  # fmt: skip


def rotary_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    early: bool = False,
) -> None:
    """As `tokenmill_kernels.ops.rotary_kv_write`: q and k rotated in place, k and v written to their slots."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, half = k.shape[1], cos_sin.shape[1] // 2
    assert q.stride(2) == k.stride(2) == v.stride(2) == k_cache.stride(3) == 1
    assert k_cache.stride() == v_cache.stride()
    heads_per_program = min(_HEADS_PER_PROGRAM, triton.next_power_of_2(num_heads))
    num_groups = triton.cdiv(num_heads, heads_per_program) + triton.cdiv(num_kv_heads, heads_per_program)
    _rotary_kv_write_kernel[(num_tokens, num_groups)](
        q, k, v, cos_sin, positions, slot_mapping, k_cache, v_cache, q_norm, k_norm, k_scale, v_scale, eps,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        *k_cache.stride()[:3], cos_sin.stride(0),
        block_size=k_cache.shape[1],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        half=half,
        half_block=triton.next_power_of_2(half),
        rest_block=triton.next_power_of_2(head_dim - 2 * half),
        dim_block=triton.next_power_of_2(head_dim),
        heads_per_program=heads_per_program,
        k_scale_is_pointer=isinstance(k_scale, torch.Tensor),
        v_scale_is_pointer=isinstance(v_scale, torch.Tensor),
        early=early,
        num_warps=_NUM_WARPS,
        **launch_options(q.device),
    )  # fmt: skip
