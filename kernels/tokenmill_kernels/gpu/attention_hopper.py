"""What `attention_prefill_hopper` consists of: items of the work list, copies to shared memory, the online softmax.

Written in Gluon, Triton's language with explicit layouts, which the interpreter does not know.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

PART_ROWS = gl.constexpr(64)
"""Query rows of a warp group."""
PIECE_DIMS = gl.constexpr(64)
"""Dimensions of one copy: 128 bytes, the widest swizzled row of shared memory."""
SLICE_ROWS = gl.constexpr(16)
"""Rows that the copying warp holds in registers at once."""
MASKED_SCORE = gl.constexpr(-1.0e30)
"""As in `attention_math`."""

_LOG2_E = gl.constexpr(1.4426950408889634)

# Names that differ between releases of Triton.
block_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""A meeting of the warps of one part of the program."""
_copy_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_copy_elements = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_VIEW_IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def wait_for_inputs(pdl: gl.constexpr):
    """As in `launch`."""
    if pdl:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_dependents_start(pdl: gl.constexpr):
    """As in `launch`."""
    if pdl:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def piece_view(tiles, count: gl.constexpr, rows: gl.constexpr):
    """Swizzled tiles as `count` pieces of `rows` rows and 128 bytes each.

    A tile consists of columns 128 bytes wide, and these of groups of 8 rows that follow each other: some rows of one
    column are one stretch of memory.
    """
    shape: gl.constexpr = [count, rows, PIECE_DIMS]
    if _VIEW_IS_PUBLIC:
        return tiles.reinterpret(tiles.dtype, shape, tiles.layout)
    else:  # noqa: RET505, the branch that is not taken must not be looked at
        return tiles._reinterpret(tiles.dtype, shape, tiles.layout)


@gluon.jit
def describe(
    item, tiles_ptr, query_start_loc_ptr, seq_lens_ptr, num_kv_heads: gl.constexpr, queries: gl.constexpr
):  # fmt: skip
    """(head, request, first row of the request, its new tokens, its tokens, first new token of the tile) of an item."""
    tile_ptr = tiles_ptr + item // num_kv_heads * 2
    request = gl.load(tile_ptr)
    first_query = gl.load(tile_ptr + 1) * queries
    query_start = gl.load(query_start_loc_ptr + request)
    query_len = gl.load(query_start_loc_ptr + request + 1) - query_start
    return item % num_kv_heads, request, query_start, query_len, gl.load(seq_lens_ptr + request), first_query


@gluon.jit
def key_range(
    query_len, seq_len, first_query, queries: gl.constexpr, block_n: gl.constexpr, window: gl.constexpr
):  # fmt: skip
    """Tiles of keys: (first that is seen, first that all rows see, first after those, first after all)."""
    last_query = gl.minimum(first_query + queries, query_len) - 1
    context = seq_len - query_len
    start = first_query * 0
    low = start
    if window > 0:
        start = gl.maximum(context + first_query - window + 1, 0) // block_n
        low = gl.cdiv(gl.maximum(context + last_query - window + 1, 0), block_n)
    return start, low, (context + first_query + 1) // block_n, gl.cdiv(context + last_query + 1, block_n)


@gluon.jit
def row_pointers(
    base_ptr, token_stride, head_stride, head, query_start, query_len, first_query,
    part: gl.constexpr, group: gl.constexpr, queries: gl.constexpr, head_dim: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """(pointers [64, D] to the rows of a part of a tile, mask [64, 1] of those that are the request's)"""
    rows = part * PART_ROWS + gl.arange(0, PART_ROWS, gl.SliceLayout(1, layout))
    row_queries = first_query + rows // group
    keep = (rows < queries * group) & (row_queries < query_len)
    offsets = (query_start + row_queries).to(gl.int64) * token_stride + (head * group + rows % group) * head_stride
    dims = gl.arange(0, head_dim, gl.SliceLayout(0, layout))
    return base_ptr + offsets[:, None] + dims[None, :], keep[:, None]


@gluon.jit
def copy_queries(target, pointers, keep):
    """Starts to bring query rows to shared memory."""
    _copy_elements(target, pointers, mask=keep)
    async_copy.commit_group()


@gluon.jit
def await_queries():
    """Waits for what `copy_queries` started, and shows it to the matrix units."""
    async_copy.wait_group(0)
    fence_async_shared()
    block_barrier()


@gluon.jit
def copy_tile(
    desc, pieces, slices, ready, stage, table_ptr, tile, seq_len, head, num_rows, patches,
    num_kv_heads: gl.constexpr, head_dim: gl.constexpr, block_n: gl.constexpr, block_size: gl.constexpr,
    stages: gl.constexpr, clean: gl.constexpr,
):  # fmt: skip
    """Starts to bring a tile of keys or values to stage `stage`. Blocks past the last token give zeros.

    `clean`: rows past the last token inside its block, which may hold anything, are zeroed too (a weight of 0 does not
    make up for a NaN). Their block arrives at a barrier of its own, whose uses `patches` counts.
    """
    columns: gl.constexpr = head_dim // PIECE_DIMS
    blocks: gl.constexpr = block_n // block_size
    piece_bytes: gl.constexpr = block_size * PIECE_DIMS * desc.dtype.primitive_bitwidth // 8
    last_block = -1
    if clean:
        last_block = gl.where(seq_len % block_size == 0, -1, seq_len // block_size - tile * blocks)
        last_block = gl.where(last_block < blocks, last_block, -1)
    if last_block >= 0:
        mbarrier.expect(ready.index(stage), piece_bytes * columns * (blocks - 1))
        mbarrier.expect(ready.index(stages), piece_bytes * columns)
    else:
        mbarrier.expect(ready.index(stage), piece_bytes * columns * blocks)
    for i in gl.static_range(blocks):
        block = tile * blocks + i
        inside = block * block_size < seq_len
        number = gl.load(table_ptr + block, mask=inside, other=0)
        row = gl.where(inside, (number * num_kv_heads + head) * block_size, num_rows)
        arrival = ready.index(gl.where(last_block == i, stages, stage))
        for column in gl.static_range(columns):
            piece = pieces.index((stage * columns + column) * blocks + i)
            _copy_block(desc, [row, column * PIECE_DIMS], arrival, piece)
    if clean:
        if last_block >= 0:
            mbarrier.wait(ready.index(stages), patches & 1)
            _zero_rows(
                slices, (stage * columns) * blocks + last_block, seq_len % block_size, blocks, block_size, columns
            )
            patches += 1
        mbarrier.arrive(ready.index(stage), count=1)
    return patches


@gluon.jit
def _zero_rows(
    slices, first_piece, count, blocks: gl.constexpr, block_size: gl.constexpr, columns: gl.constexpr
):  # fmt: skip
    """Zeroes the rows of a block from row `count` on, in all of its columns."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    num_slices: gl.constexpr = block_size // SLICE_ROWS
    rows = gl.arange(0, SLICE_ROWS, gl.SliceLayout(1, layout))[:, None]
    for i in range(columns * num_slices):
        piece = first_piece + i // num_slices * blocks
        part = slices.index(piece * num_slices + i % num_slices)
        values = part.load(layout)
        part.store(gl.where(rows < count - i % num_slices * SLICE_ROWS, values, gl.zeros_like(values)))
    fence_async_shared()
    block_barrier()


@gluon.jit
def release(free, stage):
    """Tells the copying warp that all warps of this part are done with a stage."""
    block_barrier()
    mbarrier.arrive(free.index(stage), count=1)


@gluon.jit
def start_scores(q_rows, k_tiles, stage, block_n: gl.constexpr, layout: gl.constexpr):
    """Starts the product of the queries with a tile of keys."""
    zero = gl.zeros([PART_ROWS, block_n], gl.float32, layout)
    return warpgroup_mma(q_rows, k_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def weigh(
    scores, peak, weight, positions, tile, scale, cap,
    block_n: gl.constexpr, window: gl.constexpr, masked: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """(weights, maximum score, sum of weights, factor that the sums so far decay by)"""
    if cap is not None:
        scaled = scores * (scale / cap)
        shrunk = gl.exp2(-2.0 * _LOG2_E * gl.abs(scaled))
        magnitude = cap * _LOG2_E * (1.0 - shrunk) / (1.0 + shrunk)
        scores = gl.where(scaled < 0.0, -magnitude, magnitude)
        factor = 1.0
    else:
        factor = scale * _LOG2_E
    if masked:
        keys = tile * block_n + gl.arange(0, block_n, gl.SliceLayout(0, layout))[None, :]
        visible = keys <= positions[:, None]
        if window > 0:
            visible = visible & (keys > positions[:, None] - window)
        scores = gl.where(visible, scores, MASKED_SCORE)
    new_peak = gl.maximum(peak, gl.max(scores, axis=1))
    decay = gl.exp2((peak - new_peak) * factor)
    shift = new_peak * factor
    if masked:
        # A row that sees no key of the tile, nor of those before: in a fused operation score and shift need not cancel.
        shift = gl.where(new_peak > MASKED_SCORE, shift, 0.0)
    weights = gl.exp2(scores * factor - shift[:, None])
    return weights, new_peak, weight * decay + gl.sum(weights, axis=1), decay
