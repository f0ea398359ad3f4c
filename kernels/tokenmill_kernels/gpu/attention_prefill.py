"""Attention of requests with several new tokens: flash-style tiles of queries over the paged cache.

A tile holds `queries` consecutive tokens of one request with all query heads of one key/value head (row = token *
group + head in group), so each key is read once for the whole group. Tiles are numbered on the device from the
query lengths; the grid covers the most tiles that the padded sizes allow, and programs past the last tile exit.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from tokenmill_kernels.gpu.attention_math import MASKED_SCORE, cache_rows, load_rows, scaled_scores

_REQUESTS_AT_ONCE = tl.constexpr(256)


@triton.jit
def _num_tiles(requests, query_start_loc_ptr, num_requests, min_query_len, queries: tl.constexpr):
    """Query tiles of each of `requests`; 0 for those with fewer than `min_query_len` new tokens."""
    inside = requests < num_requests
    start = tl.load(query_start_loc_ptr + requests, mask=inside, other=0)
    end = tl.load(query_start_loc_ptr + requests + 1, mask=inside, other=0)
    return tl.where(end - start >= min_query_len, tl.cdiv(end - start, queries), 0)


@triton.jit
def _locate(index, query_start_loc_ptr, num_requests, min_query_len, queries: tl.constexpr):
    """(request, tile within it) of the tile that comes `index` before the last one; request == num_requests if there
    are fewer. Counting from the end starts the tiles with the longest context first."""
    tiles = tl.zeros((_REQUESTS_AT_ONCE,), dtype=tl.int32)
    for base in range(0, num_requests, _REQUESTS_AT_ONCE):
        requests = base + tl.arange(0, _REQUESTS_AT_ONCE)
        tiles += _num_tiles(requests, query_start_loc_ptr, num_requests, min_query_len, queries)
    total = tl.sum(tiles, axis=0)
    wanted = total - 1 - index
    request = 0
    request_start = 0
    seen = 0
    for base in range(0, num_requests, _REQUESTS_AT_ONCE):
        requests = base + tl.arange(0, _REQUESTS_AT_ONCE)
        tiles = _num_tiles(requests, query_start_loc_ptr, num_requests, min_query_len, queries)
        ends = seen + tl.cumsum(tiles, axis=0)
        before = ends <= wanted
        request += tl.sum(before.to(tl.int32), axis=0)
        request_start = tl.maximum(request_start, tl.max(tl.where(before, ends, 0), axis=0))
        seen += tl.sum(tiles, axis=0)
    return tl.where(wanted < 0, num_requests, request), wanted - request_start


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


@triton.jit(do_not_specialize=["num_requests", "min_query_len", "table_stride"])
def prefill_kernel(
    out_ptr, q_ptr, k_ptr, v_ptr, query_start_loc_ptr, seq_lens_ptr, block_tables_ptr,
    num_requests, min_query_len, scale, cap, q_token_stride, q_head_stride, out_token_stride, out_head_stride,
    cache_block_stride, cache_token_stride, cache_head_stride, table_stride,
    group: tl.constexpr, head_dim: tl.constexpr, dim_block: tl.constexpr, block_m: tl.constexpr,
    block_n: tl.constexpr, block_size: tl.constexpr, window: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Program (i, h) computes the i-th query tile from the end for key/value head h."""
    queries: tl.constexpr = block_m // group
    head = tl.program_id(1)
    request, tile = _locate(tl.program_id(0), query_start_loc_ptr, num_requests, min_query_len, queries)
    if request < num_requests:
        query_start = tl.load(query_start_loc_ptr + request)
        query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
        seq_len = tl.load(seq_lens_ptr + request)
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
        k_head_ptr = k_ptr + head * cache_head_stride
        v_head_ptr = v_ptr + head * cache_head_stride
        table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
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
        tl.store(out_ptrs, (values / weight[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
