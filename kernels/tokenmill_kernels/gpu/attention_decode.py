"""Attention of requests with one new token: one launch, whose grid depends on the device alone.

Every program attends to one run of the tile list that `attention_planner` built. A head whose tiles lie in one run is
finished there. Otherwise each of its programs leaves a partial result, and whichever of them comes last merges them.

Why the merge sees all partials: the threads of a program store a partial, meet at a barrier, and then one of them adds
1 to the head's count with acquire-release semantics at device scope. The barrier puts the stores of all threads before
that addition, and the release makes them visible to whoever acquires a later value of the count. The program that
reads n - 1 of n acquired the value that the others wrote, one after the other in one release sequence; its threads
receive the value through a barrier again, so their loads come after every store. Each run holds the beginning of at
most one head that goes on in the next run, so counting under the number of that run keeps heads apart. The last
program sets the count back to 0, which the next launch on the stream finds, as launches do not overlap in what they
write: each waits for the end of the one before it. No program ever waits for another one.
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
def _merged(
    partials_ptr, stats_ptr, first_run, last_run,
    group: tl.constexpr, rows_block: tl.constexpr, head_dim: tl.constexpr, dim_block: tl.constexpr,
    runs_at_once: tl.constexpr,
):  # fmt: skip
    """Attention output [rows_block, D] of the query heads of a group, from the partials of runs first_run..last_run.

    The head begins in the second part of the first run, and in the first part of all others.
    """
    rows = tl.arange(0, rows_block)[None, :]
    dims = tl.arange(0, dim_block)[None, None, :]
    peak = tl.full((rows_block,), MASKED_SCORE, dtype=tl.float32)
    weight = tl.zeros((rows_block,), dtype=tl.float32)
    values = tl.zeros((rows_block, dim_block), dtype=tl.float32)
    for base in range(first_run, last_run + 1, runs_at_once):
        runs = (base + tl.arange(0, runs_at_once))[:, None]
        inside = (runs <= last_run) & (rows < group)
        partial_rows = (runs * 2 + (runs == first_run).to(tl.int32)) * group + rows
        # Past the first-level cache, which other multiprocessors do not write to. Rows past the group get a weight.
        peaks = tl.load(stats_ptr + partial_rows * 2, mask=inside, other=MASKED_SCORE, cache_modifier=".cg")
        sums = tl.load(stats_ptr + partial_rows * 2 + 1, mask=inside, other=1.0, cache_modifier=".cg")
        partials = tl.load(
            partials_ptr + partial_rows[:, :, None] * head_dim + dims,
            mask=inside[:, :, None] & (dims < head_dim), other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new_peak = tl.maximum(peak, tl.max(peaks, axis=0))
        decay = tl.exp2(peak - new_peak)
        factors = tl.exp2(peaks - new_peak[None, :])
        weight = weight * decay + tl.sum(sums * factors, axis=0)
        values = values * decay[:, None] + tl.sum(partials * factors[:, :, None], axis=0)
        peak = new_peak
    return values / weight[:, None]


@triton.jit(do_not_specialize=["num_requests", "table_stride"])
def decode_kernel(
    out_ptr, partials_ptr, stats_ptr, arrivals_ptr, runs_ptr, q_ptr, k_ptr, v_ptr, query_start_loc_ptr, seq_lens_ptr,
    block_tables_ptr, num_requests, scale, v_scale, k_scale_ptr, v_scale_ptr, scale_stride, cap,
    q_token_stride, q_head_stride, out_token_stride, out_head_stride,
    cache_block_stride, cache_token_stride, cache_head_stride, table_stride,
    num_kv_heads: tl.constexpr, group: tl.constexpr, group_block: tl.constexpr, rows_block: tl.constexpr,
    head_dim: tl.constexpr, dim_block: tl.constexpr, block_n: tl.constexpr, block_size: tl.constexpr,
    window: tl.constexpr, runs_at_once: tl.constexpr, precision: tl.constexpr, early: tl.constexpr,
    pdl: tl.constexpr,
):  # fmt: skip
    """Program p attends to run p. Its first part goes to partial 2 p if the head began in an earlier run, its last
    part to partial 2 p + 1 if the head goes on in a later one; whole heads go to `out`.

    `early`: the plan and the lengths were written at least two launches ago. Then they are complete before the wait:
    the launch before this one was told to let it start only by programs that had themselves waited for those.
    """
    if not early:
        wait_for_inputs(pdl)
    run = tl.program_id(0)
    fields = runs_ptr + run * RUN_FIELDS
    length = tl.load(fields)
    count = tl.load(fields + 1)
    multiple = tl.load(fields + 2)
    request = tl.load(fields + 3)
    request_start = tl.load(fields + 4)
    index = run * length
    end = index + count
    tiles = decode_tiles(request, query_start_loc_ptr, seq_lens_ptr, num_requests, block_n, window)
    if early:
        wait_for_inputs(pdl)
    let_dependents_start(pdl)

    rows = tl.arange(0, group_block)
    dims = tl.arange(0, dim_block)[None, :]
    keep = (rows < group)[:, None] & (dims < head_dim)
    while index < end:
        padded = tl.cdiv(tiles, multiple) * multiple
        while index >= request_start + padded * num_kv_heads:
            request_start += padded * num_kv_heads
            request += 1
            tiles = decode_tiles(request, query_start_loc_ptr, seq_lens_ptr, num_requests, block_n, window)
            padded = tl.cdiv(tiles, multiple) * multiple
        head = (index - request_start) // padded
        first = (index - request_start) % padded
        last = tl.minimum(tiles, first + end - index)
        token = tl.load(query_start_loc_ptr + request).to(tl.int64)
        heads = head * group + rows[:, None]
        q = tl.load(q_ptr + token * q_token_stride + heads * q_head_stride + dims, mask=keep, other=0.0)
        values, peak, weight = _attend_tiles(
            q, k_ptr + head * cache_head_stride, v_ptr + head * cache_head_stride,
            block_tables_ptr + request.to(tl.int64) * table_stride, tl.load(seq_lens_ptr + request), first, last,
            cache_scale(scale, k_scale_ptr, head, scale_stride), cap, cache_block_stride, cache_token_stride,
            group_block, head_dim, dim_block, block_n, block_size, window, precision,
        )  # fmt: skip
        value_scale = cache_scale(v_scale, v_scale_ptr, head, scale_stride)
        if last - first == tiles:
            out_ptrs = out_ptr + token * out_token_stride + heads * out_head_stride + dims
            result = values * (value_scale / weight)[:, None]
            tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=keep)
        else:
            partial_rows = (run * 2 + (first == 0).to(tl.int32)) * group + rows
            tl.store(partials_ptr + partial_rows[:, None] * head_dim + dims, values, mask=keep)
            tl.store(stats_ptr + partial_rows * 2, peak, mask=rows < group)
            tl.store(stats_ptr + partial_rows * 2 + 1, weight, mask=rows < group)
            first_run = (index - first) // length
            last_run = (index - first + tiles - 1) // length
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals_ptr + first_run, 1, sem="acq_rel")
            if arrived == last_run - first_run:
                merged = _merged(
                    partials_ptr, stats_ptr, first_run, last_run, group, rows_block, head_dim, dim_block, runs_at_once
                )  # fmt: skip
                merged_rows = tl.arange(0, rows_block)
                merged_heads = head * group + merged_rows[:, None]
                out_ptrs = out_ptr + token * out_token_stride + merged_heads * out_head_stride + dims
                mask = (merged_rows < group)[:, None] & (dims < head_dim)
                tl.store(out_ptrs, (merged * value_scale).to(out_ptr.dtype.element_ty), mask=mask)
                tl.store(arrivals_ptr + first_run, 0)
        index += tl.minimum(padded - first, end - index)
