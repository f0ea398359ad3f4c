"""Attention of requests with one new token: two launches whose grids depend on the device alone.

The keys of all such requests are cut into tiles, numbered request by request and within a request head by head:

    request 0, head 0, tiles 0..t0-1 | request 0, head 1, ... | request 1, head 0, ...

Every program of the first launch attends to an equal run of that list, so a batch of any lengths is balanced and
nothing is launched in vain. A head whose tiles lie in one run is finished there. Otherwise each program leaves a
partial result, and the second launch merges them: program p merges the head that begins in run p and ends later.
Both find their place by summing the lengths on the device.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from tokenmill_kernels.gpu.attention_math import MASKED_SCORE, cache_rows, load_rows, scaled_scores

_REQUESTS_AT_ONCE = tl.constexpr(256)


@triton.jit
def _first_tile(seq_len, block_n: tl.constexpr, window: tl.constexpr):
    """The first tile of keys that the last of `seq_len` tokens sees; `window` 0 means no window."""
    return seq_len * 0 if window == 0 else tl.maximum(seq_len - window, 0) // block_n


@triton.jit
def _num_tiles(
    requests, query_start_loc_ptr, seq_lens_ptr, num_requests, block_n: tl.constexpr, window: tl.constexpr
):  # fmt: skip
    """Tiles of keys per head of `requests` (a scalar or a vector); 0 for those without exactly one new token."""
    inside = requests < num_requests
    start = tl.load(query_start_loc_ptr + requests, mask=inside, other=0)
    end = tl.load(query_start_loc_ptr + requests + 1, mask=inside, other=0)
    seq_len = tl.load(seq_lens_ptr + requests, mask=inside, other=0)
    return tl.where(end - start == 1, tl.cdiv(seq_len, block_n) - _first_tile(seq_len, block_n, window), 0)


@triton.jit
def _run_length(
    query_start_loc_ptr, seq_lens_ptr, num_requests, num_runs,
    num_kv_heads: tl.constexpr, block_n: tl.constexpr, window: tl.constexpr,
):  # fmt: skip
    """(tiles of one run, tiles of the whole list)"""
    tiles = tl.zeros((_REQUESTS_AT_ONCE,), dtype=tl.int32)
    for base in range(0, num_requests, _REQUESTS_AT_ONCE):
        requests = base + tl.arange(0, _REQUESTS_AT_ONCE)
        tiles += _num_tiles(requests, query_start_loc_ptr, seq_lens_ptr, num_requests, block_n, window)
    total = tl.sum(tiles, axis=0) * num_kv_heads
    return tl.cdiv(total, num_runs), total


@triton.jit
def _locate(
    index, query_start_loc_ptr, seq_lens_ptr, num_requests,
    num_kv_heads: tl.constexpr, block_n: tl.constexpr, window: tl.constexpr,
):  # fmt: skip
    """(request that owns tile `index` of the list, index of that request's first tile)"""
    request = 0
    request_start = 0
    seen = 0
    for base in range(0, num_requests, _REQUESTS_AT_ONCE):
        requests = base + tl.arange(0, _REQUESTS_AT_ONCE)
        tiles = _num_tiles(requests, query_start_loc_ptr, seq_lens_ptr, num_requests, block_n, window) * num_kv_heads
        ends = seen + tl.cumsum(tiles, axis=0)
        before = ends <= index
        request += tl.sum(before.to(tl.int32), axis=0)
        request_start = tl.maximum(request_start, tl.max(tl.where(before, ends, 0), axis=0))
        seen += tl.sum(tiles, axis=0)
    return request, request_start


@triton.jit
def _attend_tiles(
    q, k_ptr, v_ptr, table_ptr, seq_len, first, last, scale, cap, block_stride, token_stride,
    group_block: tl.constexpr, head_dim: tl.constexpr, dim_block: tl.constexpr, block_n: tl.constexpr,
    block_size: tl.constexpr, window: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Attention of q [G, D] to tiles [first, last): (unnormalised sum of values, maximum score, sum of weights)."""
    tile_start = _first_tile(seq_len, block_n, window)
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


@triton.jit(do_not_specialize=["num_requests", "table_stride"])
def decode_kernel(
    out_ptr, partials_ptr, stats_ptr, q_ptr, k_ptr, v_ptr, query_start_loc_ptr, seq_lens_ptr, block_tables_ptr,
    num_requests, scale, cap, q_token_stride, q_head_stride, out_token_stride, out_head_stride,
    cache_block_stride, cache_token_stride, cache_head_stride, table_stride,
    num_kv_heads: tl.constexpr, group: tl.constexpr, group_block: tl.constexpr, head_dim: tl.constexpr,
    dim_block: tl.constexpr, block_n: tl.constexpr, block_size: tl.constexpr, window: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """Program p attends to run p. Its first part goes to partial 2 p if the head began in an earlier run, its last
    part to partial 2 p + 1 if the head goes on in a later one; whole heads go to `out`.

    `partials` is float32 [2 * num_programs, group, head_dim], `stats` float32 [2 * num_programs, group, 2]: maximum
    score and sum of weights.
    """
    run = tl.program_id(0)
    run_length, total = _run_length(
        query_start_loc_ptr, seq_lens_ptr, num_requests, tl.num_programs(0), num_kv_heads, block_n, window
    )
    index = run * run_length
    end = tl.minimum(index + run_length, total)
    request, request_start = _locate(
        index, query_start_loc_ptr, seq_lens_ptr, num_requests, num_kv_heads, block_n, window
    )
    tiles = _num_tiles(request, query_start_loc_ptr, seq_lens_ptr, num_requests, block_n, window)
    rows = tl.arange(0, group_block)
    dims = tl.arange(0, dim_block)[None, :]
    keep = (rows < group)[:, None] & (dims < head_dim)
    while index < end:
        while index >= request_start + tiles * num_kv_heads:
            request_start += tiles * num_kv_heads
            request += 1
            tiles = _num_tiles(request, query_start_loc_ptr, seq_lens_ptr, num_requests, block_n, window)
        head = (index - request_start) // tiles
        first = (index - request_start) % tiles
        last = tl.minimum(tiles, first + end - index)
        token = tl.load(query_start_loc_ptr + request).to(tl.int64)
        heads = head * group + rows[:, None]
        q = tl.load(q_ptr + token * q_token_stride + heads * q_head_stride + dims, mask=keep, other=0.0)
        values, peak, weight = _attend_tiles(
            q, k_ptr + head * cache_head_stride, v_ptr + head * cache_head_stride,
            block_tables_ptr + request.to(tl.int64) * table_stride, tl.load(seq_lens_ptr + request), first, last,
            scale, cap, cache_block_stride, cache_token_stride,
            group_block, head_dim, dim_block, block_n, block_size, window, precision,
        )  # fmt: skip
        if last - first == tiles:
            out_ptrs = out_ptr + token * out_token_stride + heads * out_head_stride + dims
            tl.store(out_ptrs, (values / weight[:, None]).to(out_ptr.dtype.element_ty), mask=keep)
        else:
            partial_rows = (run * 2 + (first == 0).to(tl.int32)) * group + rows
            tl.store(partials_ptr + partial_rows[:, None] * head_dim + dims, values, mask=keep)
            tl.store(stats_ptr + partial_rows * 2, peak, mask=rows < group)
            tl.store(stats_ptr + partial_rows * 2 + 1, weight, mask=rows < group)
        index += last - first


@triton.jit
def _merge(
    partials_ptr, stats_ptr, first_run, last_run, row,
    group: tl.constexpr, head_dim: tl.constexpr, dim_block: tl.constexpr, runs_at_once: tl.constexpr,
):  # fmt: skip
    """Attention output [D] of query head `row` of its group, from the partials of runs first_run..last_run."""
    dims = tl.arange(0, dim_block)
    peak = MASKED_SCORE
    weight = 0.0
    values = tl.zeros((dim_block,), dtype=tl.float32)
    for base in range(first_run, last_run + 1, runs_at_once):
        runs = base + tl.arange(0, runs_at_once)
        inside = runs <= last_run
        partial_rows = (runs * 2 + (runs == first_run).to(tl.int32)) * group + row
        peaks = tl.load(stats_ptr + partial_rows * 2, mask=inside, other=MASKED_SCORE)
        sums = tl.load(stats_ptr + partial_rows * 2 + 1, mask=inside, other=0.0)
        mask = inside[:, None] & (dims < head_dim)[None, :]
        partials = tl.load(partials_ptr + partial_rows[:, None] * head_dim + dims[None, :], mask=mask, other=0.0)
        new_peak = tl.maximum(peak, tl.max(peaks, axis=0))
        decay = tl.exp2(peak - new_peak)
        factors = tl.exp2(peaks - new_peak)
        weight = weight * decay + tl.sum(sums * factors, axis=0)
        values = values * decay + tl.sum(partials * factors[:, None], axis=0)
        peak = new_peak
    return values / weight


@triton.jit(do_not_specialize=["num_requests"])
def merge_kernel(
    out_ptr, partials_ptr, stats_ptr, query_start_loc_ptr, seq_lens_ptr, num_requests,
    out_token_stride, out_head_stride,
    num_kv_heads: tl.constexpr, group: tl.constexpr, head_dim: tl.constexpr, dim_block: tl.constexpr,
    block_n: tl.constexpr, window: tl.constexpr, runs_at_once: tl.constexpr,
):  # fmt: skip
    """Program (p, g) finishes query head g of the key/value head that begins in run p and ends in a later one."""
    run = tl.program_id(0)
    row = tl.program_id(1)
    run_length, total = _run_length(
        query_start_loc_ptr, seq_lens_ptr, num_requests, tl.num_programs(0), num_kv_heads, block_n, window
    )
    run_end = (run + 1) * run_length
    if run_end < total:
        request, request_start = _locate(
            run_end, query_start_loc_ptr, seq_lens_ptr, num_requests, num_kv_heads, block_n, window
        )
        tiles = _num_tiles(request, query_start_loc_ptr, seq_lens_ptr, num_requests, block_n, window)
        head = (run_end - request_start) // tiles
        head_start = request_start + head * tiles
        if (head_start < run_end) & (head_start >= run_end - run_length):
            last_run = (head_start + tiles - 1) // run_length
            values = _merge(partials_ptr, stats_ptr, run, last_run, row, group, head_dim, dim_block, runs_at_once)
            token = tl.load(query_start_loc_ptr + request).to(tl.int64)
            dims = tl.arange(0, dim_block)
            out_ptrs = out_ptr + token * out_token_stride + (head * group + row) * out_head_stride + dims
            tl.store(out_ptrs, values.to(out_ptr.dtype.element_ty), mask=dims < head_dim)
