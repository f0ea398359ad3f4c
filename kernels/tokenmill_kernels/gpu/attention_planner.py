"""Builds the work list of a step's attention on the device, in one launch.

Decodes (requests with exactly one new token). Their keys are cut into tiles, numbered request by request and within
a request head by head:

    request 0, head 0, tiles 0..t0-1 | request 0, head 1, ... | request 1, head 0, ...

Program p of the decode launch attends to run p of that list, all runs being equally long, so a batch of any lengths
is balanced and nothing is launched in vain. Where it costs little balance, every head is padded to whole runs: then
each program has one part of one head, and shorter heads are not merged at all.

Prefills (all others). A tile is some consecutive tokens of one request. Tiles are listed request by request, so that
those which read the same keys run together: the longest request first, and its last tokens, which see the most keys,
first. Programs draw tiles from the list as they become free.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from tokenmill_kernels.gpu.attention_math import decode_tiles
from tokenmill_kernels.gpu.attention_plan import DecodePlan, PrefillPlan
from tokenmill_kernels.gpu.launch import device_limits, launch_options, wait_for_inputs

_REQUESTS_AT_ONCE = tl.constexpr(256)
_RUNS_AT_ONCE = tl.constexpr(16)
_TILES_AT_ONCE = tl.constexpr(16)

RUN_FIELDS = tl.constexpr(16)
"""int32 of a run. Where it begins: number of tiles, multiple that heads are padded to, request of the first tile, place
in that request's part of the list, row of q, tokens of the request. Then the head that begins in the run and goes on in
later ones: last of these runs (-1 if there is none), row of q, number of the head. The rest is padding."""


@triton.jit
def _padded_tiles(
    query_start_loc_ptr, seq_lens_ptr, num_requests, multiple, block_n: tl.constexpr, window: tl.constexpr
):
    """Tiles per head of all decodes together, those of each padded to a multiple of `multiple`."""
    tiles = tl.zeros((_REQUESTS_AT_ONCE,), dtype=tl.int32)
    for base in range(0, num_requests, _REQUESTS_AT_ONCE):
        requests = base + tl.arange(0, _REQUESTS_AT_ONCE)
        of_each = decode_tiles(requests, query_start_loc_ptr, seq_lens_ptr, num_requests, block_n, window)
        tiles += tl.cdiv(of_each, multiple) * multiple
    return tl.sum(tiles, axis=0)


@triton.jit
def _run_length(
    query_start_loc_ptr, seq_lens_ptr, num_requests,
    num_kv_heads: tl.constexpr, num_sms: tl.constexpr, programs_per_sm: tl.constexpr, block_n: tl.constexpr,
    window: tl.constexpr,
):  # fmt: skip
    """(tiles of a run, multiple that heads are padded to).

    A run that crosses heads starts its pipeline anew at each, and what it leaves has to be merged. So heads are padded
    to whole runs if the busiest multiprocessor gets at most an eighth more, on all programs or on fewer.
    """
    total = _padded_tiles(query_start_loc_ptr, seq_lens_ptr, num_requests, 1, block_n, window) * num_kv_heads
    length = tl.maximum(tl.cdiv(total, num_sms * programs_per_sm), 1)
    multiple = 1
    for shared in tl.static_range(min(2, programs_per_sm), programs_per_sm + 1):
        equal = tl.maximum(tl.cdiv(total, num_sms * shared), 1)
        for attempt in tl.static_range(2):
            longest = equal * 9 // 8 if attempt == 0 else equal
            padded = _padded_tiles(query_start_loc_ptr, seq_lens_ptr, num_requests, longest, block_n, window)
            fits = padded // longest * num_kv_heads <= num_sms * shared
            length = tl.where(fits, longest, length)
            multiple = tl.where(fits, longest, multiple)
    return length, multiple


@triton.jit
def _locate(
    index, query_start_loc_ptr, seq_lens_ptr, num_requests, multiple,
    num_kv_heads: tl.constexpr, block_n: tl.constexpr, window: tl.constexpr,
):  # fmt: skip
    """(request that owns place `index` [N] of the list, place where its part begins, length of the list)"""
    request = tl.zeros_like(index)
    request_start = tl.zeros_like(index)
    seen = 0
    for base in range(0, num_requests, _REQUESTS_AT_ONCE):
        requests = base + tl.arange(0, _REQUESTS_AT_ONCE)
        tiles = decode_tiles(requests, query_start_loc_ptr, seq_lens_ptr, num_requests, block_n, window)
        tiles = tl.cdiv(tiles, multiple) * multiple * num_kv_heads
        ends = (seen + tl.cumsum(tiles, axis=0))[None, :]
        before = ends <= index[:, None]
        request += tl.sum(before.to(tl.int32), axis=1)
        request_start = tl.maximum(request_start, tl.max(tl.where(before, ends, 0), axis=1))
        seen += tl.sum(tiles, axis=0)
    return request, request_start, seen


@triton.jit
def _plan_decodes(
    runs_ptr, query_start_loc_ptr, seq_lens_ptr, num_requests, first_run,
    num_kv_heads: tl.constexpr, num_sms: tl.constexpr, programs_per_sm: tl.constexpr, block_n: tl.constexpr,
    window: tl.constexpr,
):  # fmt: skip
    """Writes the runs from `first_run` on."""
    length, multiple = _run_length(
        query_start_loc_ptr, seq_lens_ptr, num_requests, num_kv_heads, num_sms, programs_per_sm, block_n, window
    )
    runs = first_run + tl.arange(0, _RUNS_AT_ONCE)
    inside = runs < num_sms * programs_per_sm
    fields = runs_ptr + runs * RUN_FIELDS
    start = runs * length
    request, request_start, total = _locate(
        start, query_start_loc_ptr, seq_lens_ptr, num_requests, multiple, num_kv_heads, block_n, window
    )
    known = inside & (request < num_requests)
    tl.store(fields, tl.minimum(tl.maximum(total - start, 0), length), mask=inside)
    tl.store(fields + 1, tl.zeros_like(runs) + multiple, mask=inside)
    tl.store(fields + 2, request, mask=inside)
    tl.store(fields + 3, start - request_start, mask=inside)
    tl.store(fields + 4, tl.load(query_start_loc_ptr + request, mask=known, other=0), mask=inside)
    tl.store(fields + 5, tl.load(seq_lens_ptr + request, mask=known, other=0), mask=inside)

    end = start + length
    request, request_start, _ = _locate(
        end, query_start_loc_ptr, seq_lens_ptr, num_requests, multiple, num_kv_heads, block_n, window
    )
    tiles = decode_tiles(request, query_start_loc_ptr, seq_lens_ptr, num_requests, block_n, window)
    padded = tl.maximum(tl.cdiv(tiles, multiple) * multiple, 1)
    head = (end - request_start) // padded
    head_start = request_start + head * padded
    goes_on = (end < total) & (head_start < end) & (head_start >= start)
    tl.store(fields + 6, tl.where(goes_on, (head_start + tiles - 1) // length, -1), mask=inside)
    known = inside & goes_on
    tl.store(fields + 7, tl.load(query_start_loc_ptr + request, mask=known, other=0), mask=inside)
    tl.store(fields + 8, head, mask=inside)


@triton.jit
def _prefill_tiles(requests, query_start_loc_ptr, num_requests, min_query_len, queries: tl.constexpr):
    """Query tiles of each of `requests` [N]; 0 for those that are not prefills."""
    inside = requests < num_requests
    start = tl.load(query_start_loc_ptr + requests, mask=inside, other=0)
    query_len = tl.load(query_start_loc_ptr + requests + 1, mask=inside, other=0) - start
    return tl.where(query_len >= min_query_len, tl.cdiv(query_len, queries), 0)


@triton.jit
def _plan_prefills(
    tiles_ptr, num_tiles_ptr, query_start_loc_ptr, seq_lens_ptr, num_requests, min_query_len, chunk,
    queries: tl.constexpr,
):  # fmt: skip
    """Puts the tiles of one chunk, counted in the order of requests, to their places in the list."""
    index = chunk * _TILES_AT_ONCE + tl.arange(0, _TILES_AT_ONCE)
    request = tl.zeros((_TILES_AT_ONCE,), dtype=tl.int32)
    request_start = tl.zeros((_TILES_AT_ONCE,), dtype=tl.int32)
    seen = 0
    for base in range(0, num_requests, _REQUESTS_AT_ONCE):
        requests = base + tl.arange(0, _REQUESTS_AT_ONCE)
        tiles = _prefill_tiles(requests, query_start_loc_ptr, num_requests, min_query_len, queries)
        ends = (seen + tl.cumsum(tiles, axis=0))[None, :]
        before = ends <= index[:, None]
        request += tl.sum(before.to(tl.int32), axis=1)
        request_start = tl.maximum(request_start, tl.max(tl.where(before, ends, 0), axis=1))
        seen += tl.sum(tiles, axis=0)
    if chunk == 0:
        tl.store(num_tiles_ptr, seen)
        tl.store(num_tiles_ptr + 1, 0)
    tile = index - request_start
    seq_len = tl.load(seq_lens_ptr + request, mask=request < num_requests, other=0)[:, None]
    place = _prefill_tiles(request, query_start_loc_ptr, num_requests, min_query_len, queries) - 1 - tile
    for base in range(0, num_requests, _REQUESTS_AT_ONCE):
        requests = base + tl.arange(0, _REQUESTS_AT_ONCE)
        tiles = _prefill_tiles(requests, query_start_loc_ptr, num_requests, min_query_len, queries)
        seq_lens = tl.load(seq_lens_ptr + requests, mask=requests < num_requests, other=0)[None, :]
        earlier = (seq_lens > seq_len) | ((seq_lens == seq_len) & (requests[None, :] < request[:, None]))
        place += tl.sum(tl.where(earlier, tiles[None, :], 0), axis=1)
    tl.store(tiles_ptr + place * 2, request, mask=index < seen)
    tl.store(tiles_ptr + place * 2 + 1, tile, mask=index < seen)


@triton.jit(do_not_specialize=["num_requests", "min_query_len", "decode_programs"])
def plan_kernel(
    runs_ptr, tiles_ptr, num_tiles_ptr, query_start_loc_ptr, seq_lens_ptr, num_requests, min_query_len,
    decode_programs,
    num_kv_heads: tl.constexpr, num_sms: tl.constexpr, programs_per_sm: tl.constexpr, block_n: tl.constexpr,
    queries: tl.constexpr, window: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """The first `decode_programs` programs write the runs of the decodes, the others the tiles of the prefills.

    The next launch starts when this one is done, since attention reads plans before it waits (see `decode_kernel`).
    """
    wait_for_inputs(pdl)
    program = tl.program_id(0)
    if program < decode_programs:
        if runs_ptr is not None:
            _plan_decodes(
                runs_ptr, query_start_loc_ptr, seq_lens_ptr, num_requests, program * _RUNS_AT_ONCE,
                num_kv_heads, num_sms, programs_per_sm, block_n, window,
            )  # fmt: skip
    elif tiles_ptr is not None:
        _plan_prefills(
            tiles_ptr, num_tiles_ptr, query_start_loc_ptr, seq_lens_ptr, num_requests, min_query_len,
            program - decode_programs, queries,
        )  # fmt: skip


def launch(
    decode: DecodePlan | None,
    prefill: PrefillPlan | None,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_kv_heads: int,
    window: int,
) -> None:
    """Fills both parts of a plan from the lengths (int32 [R + 1] and [R]), which only the device reads."""
    num_sms = device_limits(seq_lens.device).num_sms
    num_runs = decode.runs.shape[0] if decode is not None else 0
    max_tiles = prefill.tiles.shape[0] if prefill is not None else 0
    decode_programs = triton.cdiv(num_runs, _RUNS_AT_ONCE.value)
    plan_kernel[(decode_programs + triton.cdiv(max_tiles, _TILES_AT_ONCE.value),)](
        decode.runs if decode is not None else None,
        prefill.tiles if prefill is not None else None,
        prefill.num_tiles if prefill is not None else None,
        query_start_loc, seq_lens, seq_lens.shape[0], 2 if decode is not None else 1, decode_programs,
        num_kv_heads=num_kv_heads,
        num_sms=num_sms,
        programs_per_sm=num_runs // num_sms,
        block_n=decode.block_n if decode is not None else 1,
        queries=prefill.queries if prefill is not None else 1,
        window=window,
        num_warps=4,
        **launch_options(seq_lens.device),
    )  # fmt: skip
