"""Products of a few tokens with a large matrix, at the speed at which the matrix comes from memory.

The weight [N, K] is cut into tiles of `block_n` rows and those into units of `block_k` columns, numbered tile by tile.
Every program multiplies an equal run of that list with all tokens at once, so each multiprocessor streams the same
number of bytes, to a granule: whole tiles where they are many, parts of them where they are few. A tile that lies in
one run is finished there. Otherwise each program leaves a partial sum, and the one that arrives last adds them up in
the order of the runs: results do not depend on timing.

Weights are constants: while the kernel before this one still runs, programs ask for the first units of their run to be
brought to the L2 cache, and wait for the tokens only then. So memory stays busy through the end of one product, the
launch of the next and the small kernels between them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from tokenmill_kernels.gpu.argmax import first_largest
from tokenmill_kernels.gpu.launch import let_dependents_start, wait_for_inputs


@triton.jit
def _weight_rows(tile, num_outputs, gated: tl.constexpr, block_n: tl.constexpr):
    """Rows of the weight in a tile, int64 [block_n]; past the end the last one stands in.

    A gated weight is gate | up, [2 * num_outputs, K]: half of a tile's rows come from each, for the same outputs.
    """
    block_out: tl.constexpr = block_n // 2 if gated else block_n
    index = tl.arange(0, block_n)
    outputs = tl.minimum(tile * block_out + index % block_out, num_outputs - 1)
    return (outputs + (index // block_out) * num_outputs).to(tl.int64)


@triton.jit
def _prefetch(
    weight_ptr, unit, k_tiles, k_size, num_outputs,
    gated: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, parts: tl.constexpr,
):  # fmt: skip
    """Asks for `unit` to be brought to the L2 cache, a row of it in `parts` requests."""
    piece: tl.constexpr = block_k // parts
    piece_bytes: tl.constexpr = piece * (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
    tile = unit // k_tiles
    rows = _weight_rows(tile, num_outputs, gated, block_n)
    columns = (unit - tile * k_tiles) * block_k + tl.arange(0, parts) * piece
    columns = tl.minimum(columns, tl.maximum(k_size - piece, 0))
    pointers = tl.reshape(weight_ptr + rows[:, None] * k_size + columns[None, :], (block_n * parts,))
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [pointers, piece_bytes],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _multiply(
    x_ptr, weight_ptr, tile, k_first, k_last, num_tokens, num_outputs, k_size, x_stride,
    gated: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, block_t: tl.constexpr, even_k: tl.constexpr,
    num_stages: tl.constexpr,
):  # fmt: skip
    """Sum over columns [k_first, k_last) * block_k of a tile, float32 [block_n, block_t].

    One token is multiplied by ordinary instructions, which leave their sums in place until the end.
    """
    columns = tl.arange(0, block_k)
    tokens = tl.arange(0, block_t)[:, None]
    rows = _weight_rows(tile, num_outputs, gated, block_n)
    weight_ptrs = weight_ptr + rows[:, None] * k_size + columns[None, :]
    x_ptrs = x_ptr + tokens * x_stride + columns[None, :]
    total = tl.zeros((block_n, block_k if block_t == 1 else block_t), dtype=tl.float32)
    for k_tile in tl.range(k_first, k_last, num_stages=num_stages):
        start = k_tile * block_k
        inside = None if even_k else (start + columns < k_size)[None, :]
        weight = tl.load(weight_ptrs + start, mask=inside, other=None if even_k else 0.0)
        if block_t == 1:
            x = tl.load(x_ptrs + start, mask=inside, other=None if even_k else 0.0)
            total += weight.to(tl.float32) * x.to(tl.float32)
        else:
            known = tokens < num_tokens if even_k else inside & (tokens < num_tokens)
            x = tl.load(x_ptrs + start, mask=known, other=0.0)
            total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
    return tl.sum(total, axis=1, keep_dims=True) if block_t == 1 else total


@triton.jit
def _first_unit(run, units, granule):
    """Runs begin at multiples of `granule` units."""
    return run * (units // granule) // tl.num_programs(0) * granule


@triton.jit
def _run_of(unit, units, granule):
    """The run that a unit belongs to."""
    return ((unit // granule + 1) * tl.num_programs(0) - 1) // (units // granule)


@triton.jit
def _add_partials(
    total, partials_ptr, arrivals_ptr, tile, k_tiles, unit, units, granule,
    block_n: tl.constexpr, block_t: tl.constexpr,
):  # fmt: skip
    """(sum over all runs that share the tile, whether this program is the last of them and holds that sum)

    Run r leaves the sum of the tile it begins in at partial 2 r, that of the tile it ends in at partial 2 r + 1.
    `arrivals` counts the programs that left theirs, and is 0 again afterwards.
    """
    run = tl.program_id(0)
    size: tl.constexpr = block_n * block_t
    places = tl.arange(0, block_n)[:, None] * block_t + tl.arange(0, block_t)[None, :]
    mine = run * 2 + (unit != _first_unit(run, units, granule)).to(tl.int32)
    tl.store(partials_ptr + mine * size + places, total, cache_modifier=".cg")
    # All threads' stores come before the arrival of the program.
    tl.debug_barrier()
    tile_start = tile * k_tiles
    first_run = _run_of(tile_start, units, granule)
    last_run = _run_of(tile_start + k_tiles - 1, units, granule)
    is_last = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == last_run - first_run
    if is_last:
        total = tl.zeros((block_n, block_t), dtype=tl.float32)
        for other in range(first_run, last_run + 1):
            partial = other * 2 + (_first_unit(other, units, granule) < tile_start).to(tl.int32)
            total += tl.load(partials_ptr + partial * size + places, cache_modifier=".cg")
        tl.store(arrivals_ptr + tile, 0)
    return total, is_last


@triton.jit
def _store_outputs(
    total, out_ptr, bias_ptr, tile, num_tokens, num_outputs, out_stride,
    gated: tl.constexpr, block_n: tl.constexpr, block_t: tl.constexpr,
):  # fmt: skip
    """Adds the bias, multiplies silu(gate) with up when `gated`, and writes the tile's outputs of all tokens."""
    block_out: tl.constexpr = block_n // 2 if gated else block_n
    if bias_ptr is not None:
        total += tl.load(bias_ptr + _weight_rows(tile, num_outputs, gated, block_n)).to(tl.float32)[:, None]
    if gated:
        gate, up = tl.split(tl.permute(tl.reshape(total, (2, block_out, block_t)), (1, 2, 0)))
        total = gate * tl.sigmoid(gate) * up
    outputs = (tile * block_out + tl.arange(0, block_out))[:, None]
    tokens = tl.arange(0, block_t)[None, :]
    keep = (outputs < num_outputs) & (tokens < num_tokens)
    tl.store(out_ptr + tokens * out_stride + outputs, total.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["num_tokens", "num_outputs", "ahead", "granule"])
def stream_kernel(
    out_ptr, best_index_ptr, x_ptr, weight_ptr, bias_ptr, partials_ptr, arrivals_ptr,
    num_tokens, num_outputs, k_size, x_stride, out_stride, ahead, granule,
    gated: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, block_t: tl.constexpr, even_k: tl.constexpr,
    parts: tl.constexpr, num_stages: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Run program_id(0) of x [num_tokens, k_size] @ weight.T -> out [num_tokens, num_outputs].

    With `best_index_ptr` nothing of that is stored, only the largest output of the tiles that the program finished:
    `out` is float32, `best_index` int32, both [block_t, num_programs].
    """
    run = tl.program_id(0)
    k_tiles = tl.cdiv(k_size, block_k)
    units = tl.cdiv(num_outputs, block_n // 2 if gated else block_n) * k_tiles
    first = _first_unit(run, units, granule)
    end = _first_unit(run + 1, units, granule)
    if pdl:
        for coming in range(first, tl.minimum(first + ahead, end)):
            _prefetch(weight_ptr, coming, k_tiles, k_size, num_outputs, gated, block_n, block_k, parts)
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    best = tl.full((block_t,), float("-inf"), dtype=tl.float32)
    best_index = tl.full((block_t,), 0, dtype=tl.int32)
    unit = first
    while unit < end:
        tile = unit // k_tiles
        k_first = unit - tile * k_tiles
        k_last = tl.minimum(k_tiles, k_first + end - unit)
        total = _multiply(
            x_ptr, weight_ptr, tile, k_first, k_last, num_tokens, num_outputs, k_size, x_stride,
            gated, block_n, block_k, block_t, even_k, num_stages,
        )  # fmt: skip
        is_mine = k_last - k_first == k_tiles
        if not is_mine:
            total, is_mine = _add_partials(
                total, partials_ptr, arrivals_ptr, tile, k_tiles, unit, units, granule, block_n, block_t
            )
        if is_mine:
            if best_index_ptr is None:
                _store_outputs(
                    total, out_ptr, bias_ptr, tile, num_tokens, num_outputs, out_stride, gated, block_n, block_t
                )  # fmt: skip
            else:
                outputs = (tile * block_n + tl.arange(0, block_n))[:, None]
                scores = tl.where(outputs < num_outputs, total, float("-inf"))
                tile_best, tile_index = first_largest(scores, outputs)
                # Tiles come in ascending order: of equals the earlier one stays.
                best_index = tl.where(tile_best > best, tile_index, best_index)
                best = tl.maximum(best, tile_best)
        unit += k_last - k_first
    if best_index_ptr is not None:
        places = tl.arange(0, block_t) * tl.num_programs(0) + run
        tl.store(out_ptr + places, best)
        tl.store(best_index_ptr + places, best_index)
