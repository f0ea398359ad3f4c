"""The prefill launch for Hopper: `attention_prefill` with every unit of the multiprocessor kept busy.

One warp draws items from the work list and brings their keys and values to shared memory with the tensor memory
accelerator, a copy per block of the cache and 64 dimensions; two warp groups of 64 query rows each multiply. Scores of
the next tile are multiplied while the values of the current one are added and its weights computed, so that
exponentials hide behind products. Tiles of keys are walked from the last to the first: those that need a mask come
first. The queries of the next item are fetched meanwhile.

On other devices, and for what is not supported here (`supports`, `reads`), `attention_prefill` computes the same.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tokenmill_kernels.gpu.attention_hopper import (
    MASKED_SCORE,
    PART_ROWS,
    PIECE_DIMS,
    SLICE_ROWS,
    await_queries,
    block_barrier,
    copy_queries,
    copy_tile,
    describe,
    key_range,
    let_dependents_start,
    piece_view,
    release,
    row_pointers,
    start_scores,
    wait_for_inputs,
    weigh,
)
from tokenmill_kernels.gpu.attention_plan import PrefillPlan
from tokenmill_kernels.gpu.launch import device_limits, launch_options

ROWS = 128
"""Query rows of a tile."""

_TILES = {64: (128, 3), 128: (128, 2), 256: (64, 2)}
"""By head size: keys of a tile, and tiles of keys and of values in flight."""
_QUERY_SLOTS = {64: 2, 128: 2, 256: 1}
"""By head size: items whose queries fit into shared memory."""
_PRODUCER_REGISTERS = gl.constexpr(24)
_CONSUMER_REGISTERS = gl.constexpr(240)


@gluon.jit
def _post(items, posted, taken, turn, item):
    """Tells both multiplying parts which item comes after that of turn `turn`."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(taken.index(turn % 2), turn // 2 & 1 ^ 1)
    items.index(turn % 2).store(gl.full([1], item, gl.int32, layout))
    block_barrier()
    mbarrier.arrive(posted.index(turn % 2), count=1)


@gluon.jit
def _next(items, posted, taken, turn):
    """What `_post` said in turn `turn`."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(posted.index(turn % 2), turn // 2 & 1)
    item = gl.max(items.index(turn % 2).load(layout), axis=0)
    release(taken, turn % 2)
    return item


@gluon.jit
def _produce(
    k_desc, v_desc, k_pieces, v_pieces, v_slices, k_ready, k_free, v_ready, v_free, items, posted, taken, tiles_ptr,
    num_tiles_ptr, num_items, query_start_loc_ptr, seq_lens_ptr, block_tables_ptr, table_stride, num_rows,
    num_kv_heads: gl.constexpr, queries: gl.constexpr, head_dim: gl.constexpr, block_n: gl.constexpr,
    block_size: gl.constexpr, window: gl.constexpr, stages: gl.constexpr,
):  # fmt: skip
    """The warp that draws and copies, in the order in which `_consume` needs the tiles."""
    count = 0
    patches = 0
    turn = 0
    item = gl.program_id(0)
    while item < num_items:
        # As `attention_prefill.draw`.
        following = gl.num_programs(0) + gl.atomic_add(num_tiles_ptr + 1, 1, sem="relaxed") % num_items
        _post(items, posted, taken, turn, following)
        head, request, _, query_len, seq_len, first_query = describe(
            item, tiles_ptr, query_start_loc_ptr, seq_lens_ptr, num_kv_heads, queries
        )  # fmt: skip
        start, _, _, end = key_range(query_len, seq_len, first_query, queries, block_n, window)
        table_ptr = block_tables_ptr + request.to(gl.int64) * table_stride
        # Values come one tile after keys.
        for i in range(end - start + 1):
            if i < end - start:
                stage = (count + i) % stages
                mbarrier.wait(k_free.index(stage), (count + i) // stages & 1 ^ 1)
                copy_tile(
                    k_desc, k_pieces, k_pieces, k_ready, stage, table_ptr, end - 1 - i, seq_len, head, num_rows, 0,
                    num_kv_heads, head_dim, block_n, block_size, stages, False,
                )  # fmt: skip
            if i > 0:
                stage = (count + i - 1) % stages
                mbarrier.wait(v_free.index(stage), (count + i - 1) // stages & 1 ^ 1)
                patches = copy_tile(
                    v_desc, v_pieces, v_slices, v_ready, stage, table_ptr, end - i, seq_len, head, num_rows, patches,
                    num_kv_heads, head_dim, block_n, block_size, stages, True,
                )  # fmt: skip
        count += end - start
        turn += 1
        item = following


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
        pending = start_scores(q_rows, k_tiles, stage, block_n, s_layout)
        v_stage = (count + i - 1) % stages
        mbarrier.wait(v_ready.index(v_stage), (count + i - 1) // stages & 1)
        adding = warpgroup_mma(weights, v_tiles.index(v_stage), values, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(pending,))
        release(k_free, stage)
        fresh, peak, weight, decay = weigh(
            scores, peak, weight, positions, end - 1 - i, scale, cap, block_n, window, masked, s_layout
        )  # fmt: skip
        values = warpgroup_mma_wait(0, deps=(adding,))
        release(v_free, v_stage)
        values = values * gl.convert_layout(decay, gl.SliceLayout(1, o_layout))[:, None]
        weights = gl.convert_layout(fresh.to(v_tiles.dtype), p_layout)
    return values, weights, peak, weight


@gluon.jit
def _finish(
    pending, q_rows, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, count, query_len, seq_len, first_query, scale,
    cap,
    part: gl.constexpr, group: gl.constexpr, queries: gl.constexpr, head_dim: gl.constexpr, block_n: gl.constexpr,
    window: gl.constexpr, stages: gl.constexpr, s_layout: gl.constexpr,
):  # fmt: skip
    """(sum of values, sum of weights, tiles of keys) of an item whose first scores are `pending`."""
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, head_dim, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    start, low, high, end = key_range(query_len, seq_len, first_query, queries, block_n, window)
    rows = part * PART_ROWS + gl.arange(0, PART_ROWS, gl.SliceLayout(1, s_layout))
    positions = seq_len - query_len + first_query + rows // group
    peak = gl.full([PART_ROWS], MASKED_SCORE, gl.float32, gl.SliceLayout(1, s_layout))
    weight = gl.zeros([PART_ROWS], gl.float32, gl.SliceLayout(1, s_layout))
    values = gl.zeros([PART_ROWS, head_dim], gl.float32, o_layout)
    scores = warpgroup_mma_wait(0, deps=(pending,))
    release(k_free, count % stages)
    fresh, peak, weight, _ = weigh(
        scores, peak, weight, positions, end - 1, scale, cap, block_n, window, True, s_layout
    )  # fmt: skip
    weights = gl.convert_layout(fresh.to(v_tiles.dtype), p_layout)
    # Tiles around those that all rows see need the mask: steps before `opened`, and from `closed` on.
    total = end - start
    opened = gl.minimum(gl.maximum(end - high, 1), total)
    closed = total
    if window > 0:
        closed = gl.minimum(gl.maximum(end - low, opened), total)
    values, weights, peak, weight = _walk(
        1, opened, values, weights, peak, weight, q_rows, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free,
        count, end, positions, scale, cap, block_n, window, stages, True, s_layout, o_layout, p_layout,
    )  # fmt: skip
    values, weights, peak, weight = _walk(
        opened, closed, values, weights, peak, weight, q_rows, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free,
        count, end, positions, scale, cap, block_n, window, stages, False, s_layout, o_layout, p_layout,
    )  # fmt: skip
    if window > 0:
        values, weights, peak, weight = _walk(
            closed, total, values, weights, peak, weight, q_rows, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free,
            count, end, positions, scale, cap, block_n, window, stages, True, s_layout, o_layout, p_layout,
        )  # fmt: skip
    stage = (count + total - 1) % stages
    mbarrier.wait(v_ready.index(stage), (count + total - 1) // stages & 1)
    values = warpgroup_mma_wait(0, deps=(warpgroup_mma(weights, v_tiles.index(stage), values, is_async=True),))
    release(v_free, stage)
    return values, gl.convert_layout(weight, gl.SliceLayout(1, o_layout)), total


@gluon.jit
def _fetch_queries(
    target, item, num_items, q_ptr, q_token_stride, q_head_stride, tiles_ptr, query_start_loc_ptr, seq_lens_ptr,
    part: gl.constexpr, num_kv_heads: gl.constexpr, group: gl.constexpr, queries: gl.constexpr,
    head_dim: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Starts to bring the queries of an item, if there is one."""
    if item < num_items:
        head, _, query_start, query_len, _, first_query = describe(
            item, tiles_ptr, query_start_loc_ptr, seq_lens_ptr, num_kv_heads, queries
        )  # fmt: skip
        pointers, keep = row_pointers(
            q_ptr, q_token_stride, q_head_stride, head, query_start, query_len, first_query, part, group, queries,
            head_dim, layout,
        )  # fmt: skip
        copy_queries(target, pointers, keep)


@gluon.jit
def _consume(
    out_ptr, q_ptr, q_slots, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, items, posted, taken, tiles_ptr,
    num_items, query_start_loc_ptr, seq_lens_ptr, scale, v_scale, cap, q_token_stride, q_head_stride,
    out_token_stride, out_head_stride,
    part: gl.constexpr, num_kv_heads: gl.constexpr, group: gl.constexpr, queries: gl.constexpr,
    head_dim: gl.constexpr, block_n: gl.constexpr, window: gl.constexpr, stages: gl.constexpr, slots: gl.constexpr,
):  # fmt: skip
    """The warp group that computes rows 64 * part and following of every tile."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_n, 16])
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // head_dim, head_dim // 8], [4, 1], [1, 0])
    count = 0
    turn = 0
    item = gl.program_id(0)
    _fetch_queries(
        q_slots.index(part), item, num_items, q_ptr, q_token_stride, q_head_stride, tiles_ptr, query_start_loc_ptr,
        seq_lens_ptr, part, num_kv_heads, group, queries, head_dim, q_layout,
    )  # fmt: skip
    while item < num_items:
        head, _, query_start, query_len, seq_len, first_query = describe(
            item, tiles_ptr, query_start_loc_ptr, seq_lens_ptr, num_kv_heads, queries
        )  # fmt: skip
        q_rows = q_slots.index(turn % slots * 2 + part)
        await_queries()
        mbarrier.wait(k_ready.index(count % stages), count // stages & 1)
        pending = start_scores(q_rows, k_tiles, count % stages, block_n, s_layout)
        following = _next(items, posted, taken, turn)
        if slots > 1:
            _fetch_queries(
                q_slots.index((turn + 1) % slots * 2 + part), following, num_items, q_ptr, q_token_stride,
                q_head_stride, tiles_ptr, query_start_loc_ptr, seq_lens_ptr, part, num_kv_heads, group, queries,
                head_dim, q_layout,
            )  # fmt: skip
        values, weight, total = _finish(
            pending, q_rows, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, count, query_len, seq_len,
            first_query, scale, cap, part, group, queries, head_dim, block_n, window, stages, s_layout,
        )  # fmt: skip
        if slots == 1:
            _fetch_queries(
                q_slots.index(part), following, num_items, q_ptr, q_token_stride, q_head_stride, tiles_ptr,
                query_start_loc_ptr, seq_lens_ptr, part, num_kv_heads, group, queries, head_dim, q_layout,
            )  # fmt: skip
        result = (values * (v_scale / weight)[:, None]).to(out_ptr.dtype.element_ty)
        pointers, keep = row_pointers(
            out_ptr, out_token_stride, out_head_stride, head, query_start, query_len, first_query, part, group,
            queries, head_dim, q_layout,
        )  # fmt: skip
        gl.store(pointers, gl.convert_layout(result, q_layout), mask=keep)
        count += total
        turn += 1
        item = following


@gluon.jit(do_not_specialize=["table_stride", "num_rows"])
def hopper_prefill_kernel(
    out_ptr, tiles_ptr, num_tiles_ptr, q_ptr, k_desc, v_desc, query_start_loc_ptr, seq_lens_ptr, block_tables_ptr,
    scale, v_scale, cap, q_token_stride, q_head_stride, out_token_stride, out_head_stride, table_stride, num_rows,
    num_kv_heads: gl.constexpr, group: gl.constexpr, head_dim: gl.constexpr, rows: gl.constexpr,
    block_n: gl.constexpr, block_size: gl.constexpr, window: gl.constexpr, stages: gl.constexpr, slots: gl.constexpr,
    pdl: gl.constexpr,
):  # fmt: skip
    """An item is a (tile, key/value head); programs draw items until none is left."""
    queries: gl.constexpr = rows // group
    layout: gl.constexpr = k_desc.layout
    q_slots = gl.allocate_shared_memory(k_desc.dtype, [2 * slots, PART_ROWS, head_dim], layout)
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [stages, block_n, head_dim], layout)
    v_tiles = gl.allocate_shared_memory(k_desc.dtype, [stages, block_n, head_dim], layout)
    num_pieces: gl.constexpr = stages * (head_dim // PIECE_DIMS) * (block_n // block_size)
    k_pieces = piece_view(k_tiles, num_pieces, block_size)
    v_pieces = piece_view(v_tiles, num_pieces, block_size)
    v_slices = piece_view(v_tiles, num_pieces * block_size // SLICE_ROWS, SLICE_ROWS)
    items = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    k_ready = gl.allocate_shared_memory(gl.int64, [stages, 1], barriers)
    k_free = gl.allocate_shared_memory(gl.int64, [stages, 1], barriers)
    v_ready = gl.allocate_shared_memory(gl.int64, [stages + 1, 1], barriers)
    v_free = gl.allocate_shared_memory(gl.int64, [stages, 1], barriers)
    posted = gl.allocate_shared_memory(gl.int64, [2, 1], barriers)
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], barriers)
    for i in gl.static_range(stages):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=2)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_free.index(i), count=2)
    mbarrier.init(v_ready.index(stages), count=1)
    for i in gl.static_range(2):
        mbarrier.init(posted.index(i), count=1)
        mbarrier.init(taken.index(i), count=2)
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    num_items = gl.load(num_tiles_ptr) * num_kv_heads
    gl.warp_specialize(
        [
            (_consume, (
                out_ptr, q_ptr, q_slots, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, items, posted, taken,
                tiles_ptr, num_items, query_start_loc_ptr, seq_lens_ptr, scale, v_scale, cap, q_token_stride,
                q_head_stride, out_token_stride, out_head_stride,
                0, num_kv_heads, group, queries, head_dim, block_n, window, stages, slots,
            )),
            (_consume, (
                out_ptr, q_ptr, q_slots, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, items, posted, taken,
                tiles_ptr, num_items, query_start_loc_ptr, seq_lens_ptr, scale, v_scale, cap, q_token_stride,
                q_head_stride, out_token_stride, out_head_stride,
                1, num_kv_heads, group, queries, head_dim, block_n, window, stages, slots,
            )),
            (_produce, (
                k_desc, v_desc, k_pieces, v_pieces, v_slices, k_ready, k_free, v_ready, v_free, items, posted, taken,
                tiles_ptr, num_tiles_ptr, num_items, query_start_loc_ptr, seq_lens_ptr, block_tables_ptr,
                table_stride, num_rows, num_kv_heads, queries, head_dim, block_n, block_size, window, stages,
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


def reads(q: torch.Tensor, cache: torch.Tensor) -> bool:
    """Whether queries [T, H, D] and a cache [num_blocks, block_size, KH, D] are laid out as the copies need it."""
    aligned = q.data_ptr() % 16 == 0 and q.stride(0) % 16 == 0 and q.stride(1) % 16 == 0
    blocks = cache.transpose(1, 2)
    return aligned and cache.dtype == q.dtype and blocks.is_contiguous() and blocks.shape[2] in (16, 32, 64)


def _descriptor(cache: torch.Tensor) -> TensorDescriptor:
    """The cache as rows of D; those of one head in one block follow each other."""
    rows = cache.transpose(1, 2).flatten(0, 2)
    layout = gl.NVMMASharedLayout(128, 16)
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [cache.shape[1], PIECE_DIMS.value], layout)


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
        slots=_QUERY_SLOTS[head_dim],
        num_warps=4,
        **launch_options(q.device),
    )  # fmt: skip
