"""The prefill launch for Hopper: `attention_prefill` with every unit of the multiprocessor kept busy.

One warp brings keys and values to shared memory with the tensor memory accelerator, a copy per block of the cache;
two warp groups of 64 query rows each multiply. Scores of the next tile are multiplied while the values of the current
one are added and its weights computed, so that exponentials hide behind products. Tiles of keys are walked from the
last to the first: those that need a mask come first.

Written in Gluon, Triton's language with explicit layouts, which the interpreter does not know: on other devices, and
for what is not supported here (`supports`, `reads`), `attention_prefill` computes the same.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tokenmill_kernels.gpu.attention_plan import PrefillPlan
from tokenmill_kernels.gpu.launch import device_limits, launch_options

ROWS = 128
"""Query rows of a tile."""

_TILES = {64: (128, 2), 128: (128, 2), 256: (64, 2)}
"""By head size: keys of a tile, and tiles of keys and of values in flight."""

_MASKED_SCORE = gl.constexpr(-1.0e30)
_LOG2_E = gl.constexpr(1.4426950408889634)
_PART_ROWS = gl.constexpr(64)
_PIECE_DIMS = gl.constexpr(64)
"""Dimensions of one copy: 128 bytes, the widest swizzled row of shared memory."""
_SLICE_ROWS = gl.constexpr(16)
"""Rows that the copying warp holds in registers at once."""
_PRODUCER_REGISTERS = gl.constexpr(24)
_CONSUMER_REGISTERS = gl.constexpr(240)

# Names that differ between releases of Triton.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_VIEW_IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def _wait_for_inputs(pdl: gl.constexpr):
    if pdl:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _let_dependents_start(pdl: gl.constexpr):
    if pdl:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _view(tiles, count: gl.constexpr, rows: gl.constexpr):
    """Swizzled tiles as `count` pieces of `rows` rows and 128 bytes each."""
    shape: gl.constexpr = [count, rows, _PIECE_DIMS]
    if _VIEW_IS_PUBLIC:
        return tiles.reinterpret(tiles.dtype, shape, tiles.layout)
    else:  # noqa: RET505, the branch that is not taken must not be looked at
        return tiles._reinterpret(tiles.dtype, shape, tiles.layout)


@gluon.jit
def _item_of(turn):
    """As `attention_prefill.item_of`."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    return turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)


@gluon.jit
def _describe(
    item, tiles_ptr, query_start_loc_ptr, seq_lens_ptr,
    num_kv_heads: gl.constexpr, queries: gl.constexpr, block_n: gl.constexpr, window: gl.constexpr,
):  # fmt: skip
    """(head, request, first row of the request, its new tokens, its tokens, first token of the tile, then tiles of
    keys: first one seen, first one that all rows see, first one after those, one past the last seen)"""
    head = item % num_kv_heads
    tile_ptr = tiles_ptr + item // num_kv_heads * 2
    request = gl.load(tile_ptr)
    first_query = gl.load(tile_ptr + 1) * queries
    query_start = gl.load(query_start_loc_ptr + request)
    query_len = gl.load(query_start_loc_ptr + request + 1) - query_start
    seq_len = gl.load(seq_lens_ptr + request)
    last_query = gl.minimum(first_query + queries, query_len) - 1
    context = seq_len - query_len
    high = (context + first_query + 1) // block_n
    end = gl.cdiv(context + last_query + 1, block_n)
    start = 0
    low = 0
    if window > 0:
        start = gl.maximum(context + first_query - window + 1, 0) // block_n
        low = gl.cdiv(gl.maximum(context + last_query - window + 1, 0), block_n)
    return head, request, query_start, query_len, seq_len, first_query, start, low, high, end


@gluon.jit
def _load_tile(
    desc, pieces, slices, ready, stage, table_ptr, tile, seq_len, head, num_rows, patches,
    num_kv_heads: gl.constexpr, head_dim: gl.constexpr, block_n: gl.constexpr, block_size: gl.constexpr,
    stages: gl.constexpr, clean: gl.constexpr,
):  # fmt: skip
    """Brings a tile of keys or values to stage `stage`. Blocks past the last token give zeros.

    `clean`: rows past the last token inside its block, which may hold anything, are zeroed too (a weight of 0 does not
    make up for a NaN). Their block arrives at a barrier of its own, whose uses `patches` counts.
    """
    halves: gl.constexpr = head_dim // _PIECE_DIMS
    blocks: gl.constexpr = block_n // block_size
    piece_bytes: gl.constexpr = block_size * _PIECE_DIMS * desc.dtype.primitive_bitwidth // 8
    last_block = -1
    if clean:
        last_block = gl.where(seq_len % block_size == 0, -1, seq_len // block_size - tile * blocks)
        last_block = gl.where(last_block < blocks, last_block, -1)
    if last_block >= 0:
        mbarrier.expect(ready.index(stage), piece_bytes * halves * (blocks - 1))
        mbarrier.expect(ready.index(stages), piece_bytes * halves)
    else:
        mbarrier.expect(ready.index(stage), piece_bytes * halves * blocks)
    for i in gl.static_range(blocks):
        block = tile * blocks + i
        inside = block * block_size < seq_len
        number = gl.load(table_ptr + block, mask=inside, other=0)
        row = gl.where(inside, (number * num_kv_heads + head) * block_size, num_rows)
        arrival = ready.index(gl.where(last_block == i, stages, stage))
        for half in gl.static_range(halves):
            piece = pieces.index((stage * halves + half) * blocks + i)
            _copy(desc, [row, half * _PIECE_DIMS], arrival, piece)
    if clean:
        if last_block >= 0:
            layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
            num_slices: gl.constexpr = block_size // _SLICE_ROWS
            mbarrier.wait(ready.index(stages), patches & 1)
            rows = gl.arange(0, _SLICE_ROWS, gl.SliceLayout(1, layout))[:, None]
            for j in range(halves * num_slices):
                patched = (stage * halves + j // num_slices) * blocks + last_block
                rest = seq_len % block_size - j % num_slices * _SLICE_ROWS
                part = slices.index(patched * num_slices + j % num_slices)
                values = part.load(layout)
                part.store(gl.where(rows < rest, values, gl.zeros_like(values)))
            fence_async_shared()
            _barrier()
            patches += 1
        mbarrier.arrive(ready.index(stage), count=1)
    return patches


@gluon.jit
def _produce(
    k_desc, v_desc, k_pieces, v_pieces, v_slices, k_ready, k_free, v_ready, v_free, tiles_ptr, num_items,
    query_start_loc_ptr, seq_lens_ptr, block_tables_ptr, table_stride, num_rows,
    num_kv_heads: gl.constexpr, queries: gl.constexpr, head_dim: gl.constexpr, block_n: gl.constexpr,
    block_size: gl.constexpr, window: gl.constexpr, stages: gl.constexpr,
):  # fmt: skip
    """The warp that copies, in the order in which `_consume` needs the tiles."""
    count = 0
    patches = 0
    for turn in range(gl.cdiv(num_items, gl.num_programs(0))):
        item = _item_of(turn)
        if item < num_items:
            head, request, _, _, seq_len, _, start, _, _, end = _describe(
                item, tiles_ptr, query_start_loc_ptr, seq_lens_ptr, num_kv_heads, queries, block_n, window
            )  # fmt: skip
            table_ptr = block_tables_ptr + request.to(gl.int64) * table_stride
            # Values come one tile after keys.
            for i in range(end - start + 1):
                if i < end - start:
                    stage = (count + i) % stages
                    mbarrier.wait(k_free.index(stage), (count + i) // stages & 1 ^ 1)
                    _load_tile(
                        k_desc, k_pieces, k_pieces, k_ready, stage, table_ptr, end - 1 - i, seq_len, head, num_rows, 0,
                        num_kv_heads, head_dim, block_n, block_size, stages, False,
                    )  # fmt: skip
                if i > 0:
                    stage = (count + i - 1) % stages
                    mbarrier.wait(v_free.index(stage), (count + i - 1) // stages & 1 ^ 1)
                    patches = _load_tile(
                        v_desc, v_pieces, v_slices, v_ready, stage, table_ptr, end - i, seq_len, head, num_rows,
                        patches, num_kv_heads, head_dim, block_n, block_size, stages, True,
                    )  # fmt: skip
            count += end - start


@gluon.jit
def _release(free, stage):
    """Tells the producer that all warps of this part are done with a stage."""
    _barrier()
    mbarrier.arrive(free.index(stage), count=1)


@gluon.jit
def _scores(q_rows, k_tiles, stage, block_n: gl.constexpr, layout: gl.constexpr):
    """Starts the product of the queries with a tile of keys."""
    zero = gl.zeros([_PART_ROWS, block_n], gl.float32, layout)
    return warpgroup_mma(q_rows, k_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _weigh(
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
        scores = gl.where(visible, scores, _MASKED_SCORE)
    new_peak = gl.maximum(peak, gl.max(scores, axis=1))
    decay = gl.exp2((peak - new_peak) * factor)
    shift = new_peak * factor
    if masked:
        # A row that sees no key of the tile, nor of those before: fused, score and shift need not cancel out.
        shift = gl.where(new_peak > _MASKED_SCORE, shift, 0.0)
    weights = gl.exp2(scores * factor - shift[:, None])
    return weights, new_peak, weight * decay + gl.sum(weights, axis=1), decay


@gluon.jit
def _walk(
    first, last, values, weights, peak, weight, q_rows, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, count,
    end, positions, scale, cap,
    block_n: gl.constexpr, window: gl.constexpr, stages: gl.constexpr, masked: gl.constexpr,
    s_layout: gl.constexpr, o_layout: gl.constexpr, p_layout: gl.constexpr,
):  # fmt: skip
    """Steps [first, last): step i multiplies the scores of tile end - 1 - i, and adds the values of the one before."""
    for i in range(first, last):
        stage = (count + i) % stages
        mbarrier.wait(k_ready.index(stage), (count + i) // stages & 1)
        pending = _scores(q_rows, k_tiles, stage, block_n, s_layout)
        v_stage = (count + i - 1) % stages
        mbarrier.wait(v_ready.index(v_stage), (count + i - 1) // stages & 1)
        adding = warpgroup_mma(weights, v_tiles.index(v_stage), values, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(pending,))
        _release(k_free, stage)
        fresh, peak, weight, decay = _weigh(
            scores, peak, weight, positions, end - 1 - i, scale, cap, block_n, window, masked, s_layout
        )  # fmt: skip
        values = warpgroup_mma_wait(0, deps=(adding,))
        _release(v_free, v_stage)
        values = values * gl.convert_layout(decay, gl.SliceLayout(1, o_layout))[:, None]
        weights = gl.convert_layout(fresh.to(v_tiles.dtype), p_layout)
    return values, weights, peak, weight


@gluon.jit
def _consume(
    out_ptr, q_ptr, q_rows, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, tiles_ptr, num_items,
    query_start_loc_ptr, seq_lens_ptr, scale, v_scale, cap, q_token_stride, q_head_stride, out_token_stride,
    out_head_stride,
    part: gl.constexpr, num_kv_heads: gl.constexpr, group: gl.constexpr, queries: gl.constexpr,
    head_dim: gl.constexpr, block_n: gl.constexpr, window: gl.constexpr, stages: gl.constexpr,
):  # fmt: skip
    """The warp group that computes rows 64 * part and following of every tile."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_n, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, head_dim, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // head_dim, head_dim // 8], [4, 1], [1, 0])
    rows = part * _PART_ROWS + gl.arange(0, _PART_ROWS, gl.SliceLayout(1, q_layout))
    score_rows = part * _PART_ROWS + gl.arange(0, _PART_ROWS, gl.SliceLayout(1, s_layout))
    dims = gl.arange(0, head_dim, gl.SliceLayout(0, q_layout))[None, :]
    count = 0
    for turn in range(gl.cdiv(num_items, gl.num_programs(0))):
        item = _item_of(turn)
        if item < num_items:
            head, _, query_start, query_len, seq_len, first_query, start, low, high, end = _describe(
                item, tiles_ptr, query_start_loc_ptr, seq_lens_ptr, num_kv_heads, queries, block_n, window
            )  # fmt: skip
            row_queries = first_query + rows // group
            keep = ((rows < queries * group) & (row_queries < query_len))[:, None]
            tokens = (query_start + row_queries).to(gl.int64)[:, None]
            heads = head * group + (rows % group)[:, None]
            q = gl.load(q_ptr + tokens * q_token_stride + heads * q_head_stride + dims, mask=keep, other=0.0)
            _barrier()
            q_rows.store(q)
            fence_async_shared()
            _barrier()

            positions = seq_len - query_len + first_query + score_rows // group
            peak = gl.full([_PART_ROWS], _MASKED_SCORE, gl.float32, gl.SliceLayout(1, s_layout))
            weight = gl.zeros([_PART_ROWS], gl.float32, gl.SliceLayout(1, s_layout))
            values = gl.zeros([_PART_ROWS, head_dim], gl.float32, o_layout)
            stage = count % stages
            mbarrier.wait(k_ready.index(stage), count // stages & 1)
            scores = warpgroup_mma_wait(0, deps=(_scores(q_rows, k_tiles, stage, block_n, s_layout),))
            _release(k_free, stage)
            fresh, peak, weight, _ = _weigh(
                scores, peak, weight, positions, end - 1, scale, cap, block_n, window, True, s_layout
            )  # fmt: skip
            weights = gl.convert_layout(fresh.to(v_tiles.dtype), p_layout)
            # Tiles around those that all rows see need the mask: steps before `opened`, and from `closed` on.
            total = end - start
            opened = gl.minimum(gl.maximum(end - high, 1), total)
            closed = total
            values, weights, peak, weight = _walk(
                1, opened, values, weights, peak, weight, q_rows, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free,
                count, end, positions, scale, cap, block_n, window, stages, True, s_layout, o_layout, p_layout,
            )  # fmt: skip
            if window > 0:
                closed = gl.minimum(gl.maximum(end - low, opened), total)
            values, weights, peak, weight = _walk(
                opened, closed, values, weights, peak, weight, q_rows, k_tiles, v_tiles, k_ready, k_free, v_ready,
                v_free, count, end, positions, scale, cap, block_n, window, stages, False, s_layout, o_layout,
                p_layout,
            )  # fmt: skip
            if window > 0:
                values, weights, peak, weight = _walk(
                    closed, total, values, weights, peak, weight, q_rows, k_tiles, v_tiles, k_ready, k_free, v_ready,
                    v_free, count, end, positions, scale, cap, block_n, window, stages, True, s_layout, o_layout,
                    p_layout,
                )  # fmt: skip
            count += total
            stage = (count - 1) % stages
            mbarrier.wait(v_ready.index(stage), (count - 1) // stages & 1)
            adding = warpgroup_mma(weights, v_tiles.index(stage), values, is_async=True)
            values = warpgroup_mma_wait(0, deps=(adding,))
            _release(v_free, stage)

            factor = gl.convert_layout(v_scale / weight, gl.SliceLayout(1, o_layout))
            result = gl.convert_layout((values * factor[:, None]).to(out_ptr.dtype.element_ty), q_layout)
            gl.store(out_ptr + tokens * out_token_stride + heads * out_head_stride + dims, result, mask=keep)


@gluon.jit(do_not_specialize=["table_stride", "num_rows"])
def hopper_prefill_kernel(
    out_ptr, tiles_ptr, num_tiles_ptr, q_ptr, k_desc, v_desc, query_start_loc_ptr, seq_lens_ptr, block_tables_ptr,
    scale, v_scale, cap, q_token_stride, q_head_stride, out_token_stride, out_head_stride, table_stride, num_rows,
    num_kv_heads: gl.constexpr, group: gl.constexpr, head_dim: gl.constexpr, rows: gl.constexpr,
    block_n: gl.constexpr, block_size: gl.constexpr, window: gl.constexpr, stages: gl.constexpr, pdl: gl.constexpr,
):  # fmt: skip
    """Every program takes one (tile, key/value head) of each round over the sorted list."""
    queries: gl.constexpr = rows // group
    layout: gl.constexpr = k_desc.layout
    q_rows = gl.allocate_shared_memory(k_desc.dtype, [2, _PART_ROWS, head_dim], layout)
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [stages, block_n, head_dim], layout)
    v_tiles = gl.allocate_shared_memory(k_desc.dtype, [stages, block_n, head_dim], layout)
    # A swizzled tile consists of columns 128 bytes wide, and these of 8 rows each: a block of one column is a piece.
    num_pieces: gl.constexpr = stages * (head_dim // _PIECE_DIMS) * (block_n // block_size)
    k_pieces = _view(k_tiles, num_pieces, block_size)
    v_pieces = _view(v_tiles, num_pieces, block_size)
    num_slices: gl.constexpr = num_pieces * block_size // _SLICE_ROWS
    v_slices = _view(v_tiles, num_slices, _SLICE_ROWS)
    k_ready = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [stages + 1, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(stages):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=2)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_free.index(i), count=2)
    mbarrier.init(v_ready.index(stages), count=1)
    _wait_for_inputs(pdl)
    _let_dependents_start(pdl)
    num_items = gl.load(num_tiles_ptr) * num_kv_heads
    gl.warp_specialize(
        [
            (_consume, (
                out_ptr, q_ptr, q_rows.index(0), k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, tiles_ptr,
                num_items, query_start_loc_ptr, seq_lens_ptr, scale, v_scale, cap, q_token_stride, q_head_stride,
                out_token_stride, out_head_stride, 0, num_kv_heads, group, queries, head_dim, block_n, window, stages,
            )),
            (_consume, (
                out_ptr, q_ptr, q_rows.index(1), k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, tiles_ptr,
                num_items, query_start_loc_ptr, seq_lens_ptr, scale, v_scale, cap, q_token_stride, q_head_stride,
                out_token_stride, out_head_stride, 1, num_kv_heads, group, queries, head_dim, block_n, window, stages,
            )),
            (_produce, (
                k_desc, v_desc, k_pieces, v_pieces, v_slices, k_ready, k_free, v_ready, v_free, tiles_ptr, num_items,
                query_start_loc_ptr, seq_lens_ptr, block_tables_ptr, table_stride, num_rows, num_kv_heads, queries,
                head_dim, block_n, block_size, window, stages,
            )),
        ],
        [4, 1],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )  # fmt: skip


def supports(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are tiles for it; one that the kernel reads so differs from others in its speed alone."""
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device)[0] == 9
        and dtype in (torch.float16, torch.bfloat16)
        and head_dim in _TILES
    )


def reads(cache: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a cache [num_blocks, block_size, KH, D] is laid out as the copies need it, for products in `dtype`."""
    return cache.dtype == dtype and cache.transpose(1, 2).is_contiguous() and cache.shape[1] in (16, 32, 64)


def _descriptor(cache: torch.Tensor) -> TensorDescriptor:
    """The cache as rows of D; those of one head in one block follow each other."""
    rows = cache.transpose(1, 2).flatten(0, 2)
    layout = gl.NVMMASharedLayout(128, 16)
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [cache.shape[1], _PIECE_DIMS.value], layout)


def launch(
    out: torch.Tensor,
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    plan: PrefillPlan,
    lengths: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scales: tuple[float, float],
    soft_cap: float | None,
    window: int,
) -> None:
    """Writes the rows of all requests in `plan`, whose tiles have ROWS rows.

    `lengths` are query_start_loc, seq_lens and block_tables, `scales` those of scores and of values.
    """
    _, num_heads, head_dim = q.shape
    num_kv_heads = caches[0].shape[2]
    block_n, stages = _TILES[head_dim]
    descriptors = [_descriptor(cache) for cache in caches]
    programs = min(device_limits(q.device).num_sms, plan.tiles.shape[0] * num_kv_heads)
    hopper_prefill_kernel[(programs,)](
        out, plan.tiles, plan.num_tiles, q, *descriptors, *lengths, *scales, soft_cap, q.stride(0), q.stride(1),
        out.stride(0), out.stride(1), lengths[2].stride(0), descriptors[0].shape[0],
        num_kv_heads=num_kv_heads,
        group=num_heads // num_kv_heads,
        head_dim=head_dim,
        rows=ROWS,
        block_n=block_n,
        block_size=caches[0].shape[1],
        window=window,
        stages=stages,
        num_warps=4,
        **launch_options(q.device),
    )  # fmt: skip
