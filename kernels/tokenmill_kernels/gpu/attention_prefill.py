"""Attention of requests with several new tokens: flash-style tiles of queries over the paged cache.

A tile holds some consecutive tokens of one request with all query heads of one key/value head (row = token * group +
head in group), so each key is read once for the whole group. The grid follows from the device alone: its programs
draw from the list of tiles that `attention_planner` built.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from tokenmill_kernels.gpu.attention_math import MASKED_SCORE, cache_rows, cache_scale, load_rows, scaled_scores
from tokenmill_kernels.gpu.launch import let_dependents_start, wait_for_inputs


@triton.jit
def _attend_tiles(
    values, peak, weight, q, positions, k_ptr, v_ptr, table_ptr, seq_len, first_tile, last_tile, scale, cap,
    block_stride, token_stride,
    head_dim: tl.constexpr, dim_block: tl.constexpr, block_n: tl.constexpr, block_size: tl.constexpr,
    window: tl.constexpr, precision: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """Adds the keys of tiles [first_tile, last_tile) to the running softmax (sum of values [M, D],
    maximum score [M], sum of weights [M]). `masked` False: every row sees every key of the range."""
    # Counted from zero: some releases of Triton pipeline no other loop around warp-group products.
    for step in range(last_tile - first_tile):
        keys = (first_tile + step) * block_n + tl.arange(0, block_n)
        cached_keys = keys
        if masked:
            # Past the end the last key stands in: its score is masked, and no row that was never written is read.
            cached_keys = tl.minimum(keys, seq_len - 1)
        rows = cache_rows(table_ptr, cached_keys, block_stride, token_stride, block_size)
        k = load_rows(k_ptr, rows, head_dim, dim_block).to(q.dtype)
        scores = scaled_scores(q, k, scale, cap, precision)
        if masked:
            visible = keys[None, :] <= positions[:, None]
            if window > 0:
                visible = visible & (keys[None, :] > positions[:, None] - window)
            scores = tl.where(visible, scores, MASKED_SCORE)
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        decay = tl.exp2(peak - new_peak)
        tile_weights = tl.exp2(scores - new_peak[:, None])
        weight = weight * decay + tl.sum(tile_weights, axis=1)
        v = load_rows(v_ptr, rows, head_dim, dim_block).to(q.dtype)
        values = tl.dot(tile_weights.to(q.dtype), v, values * decay[:, None], input_precision=precision)
        peak = new_peak
    return values, peak, weight


@triton.jit
def draw(num_tiles_ptr, num_items):
    """The next item for this program; none is left if it is not below `num_items`.

    The first items are the numbers of the programs. Each program that had one draws until it gets none, so a launch
    makes as many draws as there are items, and the next launch with the same plan finds a multiple of that.
    """
    return tl.num_programs(0) + tl.atomic_add(num_tiles_ptr + 1, 1, sem="relaxed") % num_items


@triton.jit
def _attend(
    out_ptr, q_ptr, k_head_ptr, v_head_ptr, table_ptr, query_start, query_len, seq_len, tile, head, scale, v_scale, cap,
    q_token_stride, q_head_stride, out_token_stride, out_head_stride, cache_block_stride, cache_token_stride,
    group: tl.constexpr, head_dim: tl.constexpr, dim_block: tl.constexpr, block_m: tl.constexpr,
    block_n: tl.constexpr, block_size: tl.constexpr, window: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Computes query tile `tile` of a request for key/value head `head`."""
    queries: tl.constexpr = block_m // group
    first_query = tile * queries
    last_query = tl.minimum(first_query + queries, query_len) - 1
    context = seq_len - query_len

    rows = tl.arange(0, block_m)
    row_queries = first_query + rows // group
    keep = (rows < queries * group) & (row_queries < query_len)
    dims = tl.arange(0, dim_block)[None, :]
    mask = keep[:, None] & (dims < head_dim)
    tokens = (query_start + row_queries).to(tl.int64)[:, None]
    heads = head * group + (rows % group)[:, None]
    q = tl.load(q_ptr + tokens * q_token_stride + heads * q_head_stride + dims, mask=mask, other=0.0)

    # All rows see every key of tiles [low, high); the tiles around them need the mask.
    high = (context + first_query + 1) // block_n
    end = tl.cdiv(context + last_query + 1, block_n)
    values = tl.zeros((block_m, dim_block), dtype=tl.float32)
    peak = tl.full((block_m,), MASKED_SCORE, dtype=tl.float32)
    weight = tl.zeros((block_m,), dtype=tl.float32)
    positions = context + row_queries
    low = 0
    if window > 0:
        start = tl.maximum(context + first_query - window + 1, 0) // block_n
        low = tl.cdiv(tl.maximum(context + last_query - window + 1, 0), block_n)
        low = tl.minimum(low, tl.maximum(high, start))
        values, peak, weight = _attend_tiles(
            values, peak, weight, q, positions, k_head_ptr, v_head_ptr, table_ptr, seq_len, start, low, scale, cap,
            cache_block_stride, cache_token_stride,
            head_dim, dim_block, block_n, block_size, window, precision, True,
        )  # fmt: skip
        high = tl.maximum(high, low)
    values, peak, weight = _attend_tiles(
        values, peak, weight, q, positions, k_head_ptr, v_head_ptr, table_ptr, seq_len, low, high, scale, cap,
        cache_block_stride, cache_token_stride,
        head_dim, dim_block, block_n, block_size, window, precision, False,
    )  # fmt: skip
    values, peak, weight = _attend_tiles(
        values, peak, weight, q, positions, k_head_ptr, v_head_ptr, table_ptr, seq_len, high, end, scale, cap,
        cache_block_stride, cache_token_stride,
        head_dim, dim_block, block_n, block_size, window, precision, True,
    )  # fmt: skip
    out_ptrs = out_ptr + tokens * out_token_stride + heads * out_head_stride + dims
    tl.store(out_ptrs, (values * (v_scale / weight)[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["table_stride"])
def prefill_kernel(
    out_ptr, tiles_ptr, num_tiles_ptr, q_ptr, k_ptr, v_ptr, query_start_loc_ptr, seq_lens_ptr, block_tables_ptr,
    scale, v_scale, k_scale_ptr, v_scale_ptr, scale_stride, cap,
    q_token_stride, q_head_stride, out_token_stride, out_head_stride,
    cache_block_stride, cache_token_stride, cache_head_stride, table_stride,
    num_kv_heads: tl.constexpr, group: tl.constexpr, head_dim: tl.constexpr, dim_block: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_size: tl.constexpr, window: tl.constexpr,
    precision: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """An item is a (tile, key/value head); programs draw items until none is left."""
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    num_items = tl.load(num_tiles_ptr) * num_kv_heads
    item = tl.program_id(0)
    while item < num_items:
        head = item % num_kv_heads
        tile_ptr = tiles_ptr + item // num_kv_heads * 2
        request = tl.load(tile_ptr)
        query_start = tl.load(query_start_loc_ptr + request)
        query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
        _attend(
            out_ptr, q_ptr, k_ptr + head * cache_head_stride, v_ptr + head * cache_head_stride,
            block_tables_ptr + request.to(tl.int64) * table_stride, query_start, query_len,
            tl.load(seq_lens_ptr + request), tl.load(tile_ptr + 1), head,
            cache_scale(scale, k_scale_ptr, head, scale_stride),
            cache_scale(v_scale, v_scale_ptr, head, scale_stride), cap,
            q_token_stride, q_head_stride, out_token_stride, out_head_stride, cache_block_stride,
            cache_token_stride, group, head_dim, dim_block, block_m, block_n, block_size, window, precision,
        )  # fmt: skip
        item = draw(num_tiles_ptr, num_items)
