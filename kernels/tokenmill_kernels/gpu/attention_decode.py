"""Attention of requests with one new token: two launches whose grids depend on the device alone.

Every program of the first one attends to one run of the tile list that `attention_planner` built. A head whose tiles
lie in one run is finished there. Otherwise each of its programs leaves a partial result, and the second launch merges
them.

(Merging in the first launch, by whichever program of a head comes last, was slower: the fence that its counter needs
waits for all memory traffic of a program, at every head that is cut.)
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from tokenmill_kernels.gpu.attention_math import (
    MASKED_SCORE,
    cache_rows,
    cache_scale,
    decode_tiles,
    first_tile,
    load_rows,
    prefetch_rows,
    scaled_scores,
)
from tokenmill_kernels.gpu.attention_planner import RUN_FIELDS
from tokenmill_kernels.gpu.launch import let_dependents_start, wait_for_inputs


@triton.jit
def _attend_tiles(
    q, k_ptr, v_ptr, table_ptr, seq_len, first, last, scale, cap, block_stride, token_stride,
    group_block: tl.constexpr, head_dim: tl.constexpr, dim_block: tl.constexpr, block_n: tl.constexpr,
    block_size: tl.constexpr, window: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Attention of q [G, D] to tiles [first, last): (unnormalised sum of values, maximum score, sum of weights)."""
    tile_start = first_tile(seq_len, block_n, window)
    peak = tl.full((group_block,), MASKED_SCORE, dtype=tl.float32)
    # Summed over the keys of a tile only at the end: one reduction across warps less per tile.
    weights = tl.zeros((group_block, block_n), dtype=tl.float32)
    values = tl.zeros((group_block, dim_block), dtype=tl.float32)
    for tile in range(tile_start + first, tile_start + last):
        keys = tile * block_n + tl.arange(0, block_n)
        # Past the end the last key stands in: its score is masked, and no row that was never written is read.
        rows = cache_rows(table_ptr, tl.minimum(keys, seq_len - 1), block_stride, token_stride, block_size)
        k = load_rows(k_ptr, rows, head_dim, dim_block).to(q.dtype)
        scores = scaled_scores(q, k, scale, cap, precision)
        visible = keys < seq_len
        if window > 0:
            visible = visible & (keys >= seq_len - window)
        scores = tl.where(visible[None, :], scores, MASKED_SCORE)
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        decay = tl.exp2(peak - new_peak)
        tile_weights = tl.exp2(scores - new_peak[:, None])
        weights = weights * decay[:, None] + tile_weights
        v = load_rows(v_ptr, rows, head_dim, dim_block).to(q.dtype)
        values = tl.dot(tile_weights.to(q.dtype), v, values * decay[:, None], input_precision=precision)
        peak = new_peak
    return values, peak, tl.sum(weights, axis=1)


@triton.jit
def _store_part(
    out_ptrs, partials_ptr, stats_ptr, values, peak, weight, whole, partial_row,
    group: tl.constexpr, group_block: tl.constexpr, head_dim: tl.constexpr, dim_block: tl.constexpr,
):  # fmt: skip
    """Stores attention of all keys of a head to `out_ptrs`, that of some of them to the partial at `partial_row`."""
    rows = tl.arange(0, group_block)
    dims = tl.arange(0, dim_block)[None, :]
    keep = (rows < group)[:, None] & (dims < head_dim)
    if whole:
        tl.store(out_ptrs, (values / weight[:, None]).to(out_ptrs.dtype.element_ty), mask=keep)
    else:
        partial_rows = partial_row + rows
        tl.store(partials_ptr + partial_rows[:, None] * head_dim + dims, values, mask=keep)
        tl.store(stats_ptr + partial_rows * 2, peak, mask=rows < group)
        tl.store(stats_ptr + partial_rows * 2 + 1, weight, mask=rows < group)


@triton.jit
def _next_decode(
    request, query_start_loc_ptr, seq_lens_ptr, num_requests, block_n: tl.constexpr, window: tl.constexpr
):  # fmt: skip
    """The first decode after `request`; there must be one."""
    request += 1
    while decode_tiles(request, query_start_loc_ptr, seq_lens_ptr, num_requests, block_n, window) == 0:
        request += 1
    return request


@triton.jit
def _load_run(fields):
    """Where a run begins, as the planner wrote it."""
    place, token, seq_len = tl.load(fields + 3), tl.load(fields + 4), tl.load(fields + 5)
    return tl.load(fields), tl.load(fields + 1), tl.load(fields + 2), place, token, seq_len


@triton.jit
def _prefetch_first_tile(
    k_ptr, v_ptr, table_ptr, count, multiple, place, seq_len, block_stride, token_stride, head_stride,
    dim_block: tl.constexpr, block_n: tl.constexpr, block_size: tl.constexpr, window: tl.constexpr,
):  # fmt: skip
    """Asks for the keys and values that a run of `count` tiles begins with."""
    if count > 0:
        start = first_tile(seq_len, block_n, window)
        padded = tl.cdiv(tl.cdiv(seq_len, block_n) - start, multiple) * multiple
        keys = tl.minimum((start + place % padded) * block_n + tl.arange(0, block_n), seq_len - 1)
        rows = cache_rows(table_ptr, keys, block_stride, token_stride, block_size) + place // padded * head_stride
        prefetch_rows(k_ptr, rows, dim_block)
        prefetch_rows(v_ptr, rows, dim_block)


@triton.jit(do_not_specialize=["num_requests", "table_stride"])
def decode_kernel(
    out_ptr, partials_ptr, stats_ptr, runs_ptr, q_ptr, k_ptr, v_ptr, query_start_loc_ptr, seq_lens_ptr,
    block_tables_ptr, num_requests, scale, v_scale, k_scale_ptr, v_scale_ptr, scale_stride, cap,
    q_token_stride, q_head_stride, out_token_stride, out_head_stride,
    cache_block_stride, cache_token_stride, cache_head_stride, table_stride,
    num_kv_heads: tl.constexpr, group: tl.constexpr, group_block: tl.constexpr, head_dim: tl.constexpr,
    dim_block: tl.constexpr, block_n: tl.constexpr, block_size: tl.constexpr, window: tl.constexpr,
    precision: tl.constexpr, early: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Program p attends to run p. Its first part goes to partial 2 p if the head began in an earlier run, its last
    part to partial 2 p + 1 if the head goes on in a later one; whole heads go to `out`.

    `early`: plan and block tables were made at least two launches ago. Then they are complete before the wait (see
    `dependent_launch`), which is the time to ask for the first keys and values; they are read after it.
    """
    if not early:
        wait_for_inputs(pdl)
    run = tl.program_id(0)
    count, multiple, request, place, token, seq_len = _load_run(runs_ptr + run * RUN_FIELDS)
    if early and pdl:
        _prefetch_first_tile(
            k_ptr, v_ptr, block_tables_ptr + request.to(tl.int64) * table_stride, count, multiple, place, seq_len,
            cache_block_stride, cache_token_stride, cache_head_stride, dim_block, block_n, block_size, window,
        )  # fmt: skip
    if early:
        wait_for_inputs(pdl)
    let_dependents_start(pdl)

    rows = tl.arange(0, group_block)
    dims = tl.arange(0, dim_block)[None, :]
    keep = (rows < group)[:, None] & (dims < head_dim)
    while count > 0:
        tiles = tl.cdiv(seq_len, block_n) - first_tile(seq_len, block_n, window)
        padded = tl.cdiv(tiles, multiple) * multiple
        head = place // padded
        first = place % padded
        last = tl.minimum(tiles, first + count)
        heads = head * group + rows[:, None]
        row = token.to(tl.int64)
        q = tl.load(q_ptr + row * q_token_stride + heads * q_head_stride + dims, mask=keep, other=0.0)
        values, peak, weight = _attend_tiles(
            q, k_ptr + head * cache_head_stride, v_ptr + head * cache_head_stride,
            block_tables_ptr + request.to(tl.int64) * table_stride, seq_len, first, last,
            cache_scale(scale, k_scale_ptr, head, scale_stride), cap, cache_block_stride, cache_token_stride,
            group_block, head_dim, dim_block, block_n, block_size, window, precision,
        )  # fmt: skip
        values *= cache_scale(v_scale, v_scale_ptr, head, scale_stride)
        _store_part(
            out_ptr + row * out_token_stride + heads * out_head_stride + dims, partials_ptr, stats_ptr, values,
            peak, weight, last - first == tiles, (run * 2 + (first == 0).to(tl.int32)) * group,
            group, group_block, head_dim, dim_block,
        )  # fmt: skip
        taken = tl.minimum(padded - first, count)
        count -= taken
        place += taken
        if (count > 0) & (place == padded * num_kv_heads):
            place = 0
            request = _next_decode(request, query_start_loc_ptr, seq_lens_ptr, num_requests, block_n, window)
            token = tl.load(query_start_loc_ptr + request)
            seq_len = tl.load(seq_lens_ptr + request)


@triton.jit
def merge_kernel(
    out_ptr, partials_ptr, stats_ptr, runs_ptr, out_token_stride, out_head_stride,
    group: tl.constexpr, head_dim: tl.constexpr, dim_block: tl.constexpr, runs_at_once: tl.constexpr,
    pdl: tl.constexpr,
):  # fmt: skip
    """Program (p, g) finishes query head g of the key/value head that begins in run p and goes on in later ones.

    The plan, at least two launches old, is complete before the wait (see `decode_kernel`). The launch after this one
    may start before the wait too, an exception to `dependent_launch`: it has the time of the decode launch to bring
    weights closer, but must not touch what that writes before it has waited itself, the attention output.
    """
    let_dependents_start(pdl)
    first_run = tl.program_id(0)
    fields = runs_ptr + first_run * RUN_FIELDS
    last_run = tl.load(fields + 6)
    token = tl.load(fields + 7).to(tl.int64)
    head = tl.load(fields + 8) * group + tl.program_id(1)
    wait_for_inputs(pdl)
    if last_run >= 0:
        dims = tl.arange(0, dim_block)
        peak = MASKED_SCORE
        weight = 0.0
        values = tl.zeros((dim_block,), dtype=tl.float32)
        for base in tl.range(first_run, last_run + 1, runs_at_once, num_stages=1):
            runs = base + tl.arange(0, runs_at_once)
            inside = runs <= last_run
            # The head begins in the second part of the first run, and in the first part of all others.
            rows = (runs * 2 + (runs == first_run).to(tl.int32)) * group + tl.program_id(1)
            peaks = tl.load(stats_ptr + rows * 2, mask=inside, other=MASKED_SCORE)
            sums = tl.load(stats_ptr + rows * 2 + 1, mask=inside, other=0.0)
            mask = inside[:, None] & (dims < head_dim)[None, :]
            partials = tl.load(partials_ptr + rows[:, None] * head_dim + dims[None, :], mask=mask, other=0.0)
            new_peak = tl.maximum(peak, tl.max(peaks, axis=0))
            decay = tl.exp2(peak - new_peak)
            factors = tl.exp2(peaks - new_peak)
            weight = weight * decay + tl.sum(sums * factors, axis=0)
            values = values * decay + tl.sum(partials * factors[:, None], axis=0)
            peak = new_peak
        out_ptrs = out_ptr + token * out_token_stride + head * out_head_stride + dims
        tl.store(out_ptrs, (values / weight).to(out_ptr.dtype.element_ty), mask=dims < head_dim)
