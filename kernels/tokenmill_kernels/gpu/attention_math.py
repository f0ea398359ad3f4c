"""What the attention kernels share: scores, cache addresses, and the tiles of keys that a request has."""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

MASKED_SCORE = tl.constexpr(-1.0e30)
"""Finite, so that a row whose first tile is masked entirely stays free of NaN; its weights vanish (exp2 underflows to
zero) as soon as a tile with a visible key raises the row's maximum."""

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def soft_capped(scores, cap):
    """cap * tanh(scores / cap), with an exponential that cannot overflow."""
    scaled = scores / cap
    shrunk = tl.exp(-2.0 * tl.abs(scaled))
    magnitude = cap * (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(scaled < 0.0, -magnitude, magnitude)


@triton.jit
def scaled_scores(q, k, scale, cap, precision: tl.constexpr):
    """Scores of q [M, D] against k [N, D] in units of log2(e), float32 [M, N]. `cap` is None or the soft cap."""
    scores = tl.dot(q, tl.trans(k), input_precision=precision)
    if cap is None:
        scores *= scale * LOG2_E
    else:
        scores = soft_capped(scores * scale, cap) * LOG2_E
    return scores


@triton.jit
def cache_rows(table_ptr, keys, block_stride, token_stride, block_size: tl.constexpr):
    """Element offsets, int64 [N], of the cache rows of token positions `keys` [N] of the request whose block table
    starts at `table_ptr`."""
    blocks = tl.load(table_ptr + keys // block_size).to(tl.int64)
    return blocks * block_stride + (keys % block_size) * token_stride


@triton.jit
def load_rows(cache_ptr, rows, head_dim: tl.constexpr, dim_block: tl.constexpr):
    """Cache rows [N, dim_block] at element offsets `rows` [N]; zero past `head_dim`."""
    dims = tl.arange(0, dim_block)[None, :]
    pointers = cache_ptr + rows[:, None] + dims
    return tl.load(pointers) if head_dim == dim_block else tl.load(pointers, mask=dims < head_dim, other=0.0)


@triton.jit
def prefetch_rows(cache_ptr, rows, dim_block: tl.constexpr):
    """Asks for cache rows [N, dim_block] at element offsets `rows` [N] to be brought to the second-level cache."""
    line: tl.constexpr = 1024 // cache_ptr.dtype.element_ty.primitive_bitwidth
    lines: tl.constexpr = (dim_block + line - 1) // line
    pointers = cache_ptr + rows[:, None] + tl.arange(0, lines)[None, :] * line
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def cache_scale(scale, scale_ptr, head, stride):
    """`scale` times what `scale_ptr` holds for key/value head `head`; None means 1."""
    if scale_ptr is not None:
        scale *= tl.load(scale_ptr + head * stride)
    return scale


@triton.jit
def first_tile(seq_len, block_n: tl.constexpr, window: tl.constexpr):
    """The first tile of keys that the last of `seq_len` tokens sees; `window` 0 means no window."""
    return seq_len * 0 if window == 0 else tl.maximum(seq_len - window, 0) // block_n


@triton.jit
def decode_tiles(
    requests, query_start_loc_ptr, seq_lens_ptr, num_requests, block_n: tl.constexpr, window: tl.constexpr
):  # fmt: skip
    """Tiles of keys per head of `requests` (a scalar or a vector); 0 for those without exactly one new token."""
    inside = requests < num_requests
    start = tl.load(query_start_loc_ptr + requests, mask=inside, other=0)
    end = tl.load(query_start_loc_ptr + requests + 1, mask=inside, other=0)
    seq_len = tl.load(seq_lens_ptr + requests, mask=inside, other=0)
    return tl.where(end - start == 1, tl.cdiv(seq_len, block_n) - first_tile(seq_len, block_n, window), 0)
