"""Kernels that sum and gather over the members of a group, by the protocol of `peer_protocol`.

Sums are in float32, in the order of ranks and rounded once, so they have the same bits on every member. What follows a
sum, the addition of a residual and an RMS norm, rounds as the kernel of `norm` does.

What is summed up while something is missing is a NaN, so a sum that is none is complete: that is quick to see, and the
norm needs the sum of squares anyway. If it stays a NaN, for it may be one when all is there, every so often the places
themselves are looked at. Loops that poll carry no tensors: Triton 3.6 cannot lay them out.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from tokenmill_kernels.gpu.launch import let_dependents_start, wait_for_inputs
from tokenmill_kernels.gpu.peer_protocol import (
    area,
    as_bits,
    begin,
    count_and_clear,
    has_nan,
    is_any,
    is_missing,
    push_to_others,
    received,
    received_sum,
)

_NOT_SPECIALIZED = ["num_rows", "num_units", "filled", "rank"]
"""So that all members and all numbers of rows run the same code."""
_PATIENCE = tl.constexpr(64)
"""Polls that give a NaN before places are looked at."""
_COMPLETE = tl.constexpr(-1)
"""In place of the number of polls: all is there, NaN or not."""


@triton.jit
def _inside(rows, columns, num_rows, num_units, width: tl.constexpr, unit: tl.constexpr):
    """Where there are numbers: of rows side by side without gaps (`unit` is not 0) those before num_units * unit."""
    return (rows < num_rows) & (columns < width) if unit == 0 else rows * width + columns < num_units * unit


@triton.jit
def _read(x_ptr, rows, columns, stride, inside):
    """Rows [rows, columns] of x."""
    return tl.load(x_ptr + rows * stride + columns, mask=inside, other=0.0)


@triton.jit
def _add(x, residual):
    """(x + residual, sums of the squares of rows [rows, 1])."""
    if residual is not None:
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    wide = x.to(tl.float32)
    return x, tl.sum(wide * wide, axis=1, keep_dims=True)


@triton.jit
def _write(
    out_ptr, sum_ptr, x, squares, weight, rows, columns, inside, out_stride, sum_stride, eps, width: tl.constexpr
):  # fmt: skip
    """Stores x, and its norm if there is a weight."""
    if sum_ptr is not None:
        tl.store(sum_ptr + rows * sum_stride + columns, x, mask=inside)
    if weight is not None:
        x = (x.to(tl.float32) * tl.rsqrt(squares / width + eps) * weight.to(tl.float32)).to(x.dtype)
    tl.store(out_ptr + rows * out_stride + columns, x, mask=inside)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def one_shot_kernel(
    out_ptr, sum_ptr, x_ptr, residual_ptr, weight_ptr, peers_ptr, state_ptr, num_rows, num_units, filled, rank,
    x_stride, residual_stride, out_stride, sum_stride, slot_bytes, eps, size: tl.constexpr, width: tl.constexpr,
    row_size: tl.constexpr, block: tl.constexpr, tile: tl.constexpr, unit: tl.constexpr, bits: tl.constexpr,
    pdl: tl.constexpr,
):  # fmt: skip
    """Tiles of rows. A slot is [size, num_rows, row_size], by member."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    columns = tl.arange(0, block)[None, :]
    weight = None if weight_ptr is None else _read(weight_ptr, 0, columns, 0, columns < width)
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    slot, filled_before = begin(state_ptr)
    first, step = tl.program_id(0) * tile, tl.num_programs(0) * tile
    for start in range(first, num_rows, step):
        rows = start + tl.arange(0, tile)[:, None]
        inside = _inside(rows, columns, num_rows, num_units, width, unit)
        own = as_bits(_read(x_ptr, rows, columns, x_stride, inside), bits)
        places = (rank * num_rows + rows) * row_size + columns
        push_to_others(peers_ptr, slot, slot_bytes, places, own, inside, rank, size, bits)
    count_and_clear(peers_ptr, state_ptr, slot, filled_before, filled, slot_bytes, rank)
    area_ptr = area(peers_ptr, rank, slot, slot_bytes, bits)
    source_size = num_rows * row_size
    for start in range(first, num_rows, step):
        rows = start + tl.arange(0, tile)[:, None]
        inside = _inside(rows, columns, num_rows, num_units, width, unit)
        own = as_bits(_read(x_ptr, rows, columns, x_stride, inside), bits)
        residual = None if residual_ptr is None else _read(residual_ptr, rows, columns, residual_stride, inside)
        places = rows * row_size + columns
        waits, polls = True, 0
        while waits:
            total, missing = received_sum(area_ptr, places, source_size, own, inside, rank, size, dtype)
            x, squares = _add(total.to(dtype), residual)
            waits = has_nan(squares) & (polls != _COMPLETE)
            if waits:
                polls += 1
                if polls == _PATIENCE:
                    total, missing = received_sum(area_ptr, places, source_size, own, inside, rank, size, dtype)
                    polls = tl.where(is_any(missing), 0, _COMPLETE)
            else:
                _write(out_ptr, sum_ptr, x, squares, weight, rows, columns, inside, out_stride, sum_stride, eps, width)


@triton.jit
def _share_sum(
    peers_ptr, area_ptr, slot, slot_bytes, own, places, sum_places, source_size, inside, rank, size: tl.constexpr,
    dtype: tl.constexpr, bits: tl.constexpr,
):  # fmt: skip
    """Waits for what is in `places` of all members' parts, and sends the sum to `sum_places` of all members."""
    waits, polls = True, 0
    while waits:
        total, missing = received_sum(area_ptr, places, source_size, own, inside, rank, size, dtype)
        waits = has_nan(total * total) & (polls != _COMPLETE)
        if waits:
            polls += 1
            if polls == _PATIENCE:
                total, missing = received_sum(area_ptr, places, source_size, own, inside, rank, size, dtype)
                polls = tl.where(is_any(missing), 0, _COMPLETE)
        else:
            pattern = as_bits(total.to(dtype), bits)
            push_to_others(peers_ptr, slot, slot_bytes, sum_places, pattern, inside, rank, size, bits)
            tl.store(area_ptr + sum_places, pattern, mask=inside)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def two_shot_kernel(
    out_ptr, sum_ptr, x_ptr, residual_ptr, weight_ptr, peers_ptr, state_ptr, num_rows, num_units, filled, rank,
    x_stride, residual_stride, out_stride, sum_stride, slot_bytes, eps, size: tl.constexpr, width: tl.constexpr,
    row_size: tl.constexpr, block: tl.constexpr, tile: tl.constexpr, unit: tl.constexpr, bits: tl.constexpr,
    pdl: tl.constexpr,
):  # fmt: skip
    """Groups of `size` rows, of which the member of the same number sums one. A slot is [size, num_groups, row_size],
    by member, of rows to be summed, and then [num_groups * size, row_size] of sums."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    columns = tl.arange(0, block)[None, :]
    weight = None if weight_ptr is None else _read(weight_ptr, 0, columns, 0, columns < width)
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    slot, filled_before = begin(state_ptr)
    num_groups = (num_rows + size - 1) // size
    source_size = num_groups * row_size
    sums_start = size * source_size
    for group in range(tl.program_id(0), num_groups, tl.num_programs(0)):
        for other in tl.static_range(size - 1):
            member = (rank + 1 + other) % size
            rows = group * size + member + tl.arange(0, 1)[:, None]
            inside = _inside(rows, columns, num_rows, num_units, width, unit)
            pattern = as_bits(_read(x_ptr, rows, columns, x_stride, inside), bits)
            target_ptr = area(peers_ptr, member, slot, slot_bytes, bits)
            tl.store(target_ptr + rank * source_size + group * row_size + columns, pattern, mask=inside)
    count_and_clear(peers_ptr, state_ptr, slot, filled_before, filled, slot_bytes, rank)
    area_ptr = area(peers_ptr, rank, slot, slot_bytes, bits)
    for group in range(tl.program_id(0), num_groups, tl.num_programs(0)):
        rows = group * size + rank + tl.arange(0, 1)[:, None]
        inside = _inside(rows, columns, num_rows, num_units, width, unit)
        own = as_bits(_read(x_ptr, rows, columns, x_stride, inside), bits)
        places, sum_places = group * row_size + columns, sums_start + rows * row_size + columns
        _share_sum(
            peers_ptr, area_ptr, slot, slot_bytes, own, places, sum_places, source_size, inside, rank, size, dtype, bits
        )
    for group in range(tl.program_id(0), num_groups, tl.num_programs(0)):
        for first in tl.static_range(0, size, tile):
            members = first + tl.arange(0, tile)[:, None]
            rows = group * size + members
            inside = _inside(rows, columns, num_rows, num_units, width, unit) & (members < size)
            residual = None if residual_ptr is None else _read(residual_ptr, rows, columns, residual_stride, inside)
            places = sums_start + rows * row_size + columns
            waits, polls = True, 0
            while waits:
                pattern = received(area_ptr, places, inside)
                x, squares = _add(pattern.to(dtype, bitcast=True), residual)
                waits = has_nan(squares) & (polls != _COMPLETE)
                if waits:
                    polls += 1
                    if polls == _PATIENCE:
                        polls = tl.where(is_missing(received(area_ptr, places, inside)), 0, _COMPLETE)
                else:
                    _write(
                        out_ptr, sum_ptr, x, squares, weight, rows, columns, inside, out_stride, sum_stride, eps, width
                    )


@triton.jit(do_not_specialize=[*_NOT_SPECIALIZED, "width"])
def gather_kernel(
    out_ptr, x_ptr, peers_ptr, state_ptr, num_units, filled, width, rank, slot_bytes,
    size: tl.constexpr, block: tl.constexpr, unit: tl.constexpr, bits: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Blocks of the num_units * unit numbers of x, rows of `width` side by side. A slot is [size, numbers rounded up to
    blocks], by member."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    slot, filled_before = begin(state_ptr)
    num_items = num_units * unit
    source_size = (num_items + block - 1) // block * block
    first, step = tl.program_id(0) * block, tl.num_programs(0) * block
    for start in range(first, num_items, step):
        items = start + tl.arange(0, block)
        inside = items < num_items
        pattern = as_bits(tl.load(x_ptr + items, mask=inside, other=0.0), bits)
        push_to_others(peers_ptr, slot, slot_bytes, rank * source_size + items, pattern, inside, rank, size, bits)
        targets = items // width * (width * size) + rank * width + items % width
        tl.store(out_ptr + targets, pattern.to(dtype, bitcast=True), mask=inside)
    count_and_clear(peers_ptr, state_ptr, slot, filled_before, filled, slot_bytes, rank)
    area_ptr = area(peers_ptr, rank, slot, slot_bytes, bits)
    for start in range(first, num_items, step):
        items = start + tl.arange(0, block)
        inside = items < num_items
        for other in tl.static_range(size - 1):
            source = (rank + 1 + other) % size
            targets = items // width * (width * size) + source * width + items % width
            waits = True
            while waits:
                pattern = received(area_ptr, source * source_size + items, inside)
                waits = is_missing(pattern)
                if not waits:
                    tl.store(out_ptr + targets, pattern.to(dtype, bitcast=True), mask=inside)
