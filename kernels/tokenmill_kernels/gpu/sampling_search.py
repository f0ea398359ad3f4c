"""The filters of a row as a threshold on its weights, found without a sort.

A scan leaves the maximum and the sum of every chunk of a row. From these follows, for each row that has filters, where
the threshold can lie. Rounds of `narrow` measure the weights above a few pivots between the bounds, until what lies
between them fits a list. `collect` fills the list, and sums up what is kept for certain; the rest is left to the draw.

Rows are cut in spans of a fixed length, and partial results belong to a span or a chunk: they do not depend on the
batch. Bounds and what was measured at them are the state of a row, kept once for every round.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from tokenmill_kernels import sampling_columns as columns
from tokenmill_kernels.gpu.launch import let_dependents_start, wait_for_inputs
from tokenmill_kernels.gpu.sampling_math import AFTER_ONE, LOG2_E, LOWEST_WEIGHT, largest_threshold, weights_of

CHUNK = tl.constexpr(128)
"""Neighbouring tokens with one maximum and one sum."""
SPAN_CHUNKS = tl.constexpr(32)
SPAN = tl.constexpr(32 * 128)
"""Tokens of one program."""
NUM_PIVOTS = tl.constexpr(8)
LIST_SIZE = tl.constexpr(4096)
STATE_SIZE = tl.constexpr(16)

TEMPERATURE = tl.constexpr(columns.TEMPERATURE)
TOP_P = tl.constexpr(columns.TOP_P)
MIN_P = tl.constexpr(columns.MIN_P)
TOP_K = tl.constexpr(columns.TOP_K)
SEED = tl.constexpr(columns.SEED)
NUM_FLOATS = tl.constexpr(columns.NUM_FLOATS)
NUM_INTEGERS = tl.constexpr(columns.NUM_INTEGERS)

# Entries of a state.
KIND = tl.constexpr(0)
ROW_MAX = tl.constexpr(1)
SCALE = tl.constexpr(2)
LOW = tl.constexpr(3)
"""The threshold is at least this weight,"""
HIGH = tl.constexpr(4)
"""and less than this one."""
NUM_LOW = tl.constexpr(5)
"""Number of weights of at least LOW,"""
NUM_HIGH = tl.constexpr(6)
MASS_LOW = tl.constexpr(7)
"""and their sum."""
MASS_HIGH = tl.constexpr(8)
TARGET = tl.constexpr(9)
"""What the weights of at least the threshold must make."""
FLOOR = tl.constexpr(10)
"""Weights under this are cut by min_p."""

# Kinds of rows.
UNFILTERED = tl.constexpr(0)
KNOWN = tl.constexpr(1)
"""LOW is the threshold."""
LISTED = tl.constexpr(2)
"""All weights of at least LOW go to the list."""
BY_COUNT = tl.constexpr(3)
"""The threshold is the TARGET-th largest weight."""
BY_MASS = tl.constexpr(4)
"""The threshold is the largest that leaves the mass TARGET."""
WHOLE = tl.constexpr(5)
"""The draw looks into all weights."""


@triton.jit
def span_offsets(span):
    """int32 [SPAN_CHUNKS, CHUNK]: tokens of a span."""
    chunks = span * SPAN_CHUNKS + tl.arange(0, SPAN_CHUNKS)
    return chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]


@triton.jit
def load_span(row_ptr, span, vocab_size):
    """float32 [SPAN_CHUNKS, CHUNK] logits of a span, minus infinity past the end."""
    tokens = span_offsets(span)
    return tl.load(row_ptr + tokens, mask=tokens < vocab_size, other=float("-inf"))


@triton.jit(do_not_specialize=["num_chunks"])
def scan_kernel(
    chunk_max_ptr, chunk_sum_ptr, logits_ptr, slots_ptr, floats_ptr, row_stride, vocab_size, num_chunks,
    pdl: tl.constexpr,
):  # fmt: skip
    """Span program_id(0) of row program_id(1): the largest logit of each chunk (infinity for a NaN), and in rows with a
    temperature the sum of the weights relative to it."""
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    span, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        temperature = tl.load(floats_ptr + slot * NUM_FLOATS + TEMPERATURE)
        logits = load_span(logits_ptr + row.to(tl.int64) * row_stride, span, vocab_size)
        logits = tl.where(logits != logits, float("inf"), logits)
        largest = tl.max(logits, axis=1)
        chunks = span * SPAN_CHUNKS + tl.arange(0, SPAN_CHUNKS)
        tl.store(chunk_max_ptr + row * num_chunks + chunks, largest, mask=chunks < num_chunks)
        if temperature > 0:
            shift = tl.where(largest == float("-inf"), 0.0, largest)
            weights = tl.exp2((logits - shift[:, None]) * (LOG2_E / temperature))
            tl.store(chunk_sum_ptr + row * num_chunks + chunks, tl.sum(weights, axis=1), mask=chunks < num_chunks)


@triton.jit
def chunk_weights(chunk_max, chunk_sum, row_max, scale):
    """Sums of the weights of each chunk, float64, relative to the largest logit of the row. Not a number in rows that
    are no distribution."""
    return chunk_sum.to(tl.float64) * tl.exp2((chunk_max - row_max) * scale).to(tl.float64)


@triton.jit
def _store_state(state_ptr, kind, row_max, scale, low, high, num_low, num_high, mass_low, mass_high, target, floor):
    tl.store(state_ptr + KIND, kind.to(tl.float64))
    tl.store(state_ptr + ROW_MAX, row_max.to(tl.float64))
    tl.store(state_ptr + SCALE, scale.to(tl.float64))
    tl.store(state_ptr + LOW, low.to(tl.float64))
    tl.store(state_ptr + HIGH, high.to(tl.float64))
    tl.store(state_ptr + NUM_LOW, num_low)
    tl.store(state_ptr + NUM_HIGH, num_high)
    tl.store(state_ptr + MASS_LOW, mass_low)
    tl.store(state_ptr + MASS_HIGH, mass_high)
    tl.store(state_ptr + TARGET, target)
    tl.store(state_ptr + FLOOR, floor.to(tl.float64))


@triton.jit
def load_state(state_ptr):
    """What `_store_state` takes, in its order."""
    return (
        tl.load(state_ptr + KIND).to(tl.int32),
        tl.load(state_ptr + ROW_MAX).to(tl.float32),
        tl.load(state_ptr + SCALE).to(tl.float32),
        tl.load(state_ptr + LOW).to(tl.float32),
        tl.load(state_ptr + HIGH).to(tl.float32),
        tl.load(state_ptr + NUM_LOW),
        tl.load(state_ptr + NUM_HIGH),
        tl.load(state_ptr + MASS_LOW),
        tl.load(state_ptr + MASS_HIGH),
        tl.load(state_ptr + TARGET),
        tl.load(state_ptr + FLOOR).to(tl.float32),
    )


@triton.jit(do_not_specialize=["num_chunks"])
def plan_kernel(
    state_ptr, num_listed_ptr, chunk_max_ptr, chunk_sum_ptr, slots_ptr, floats_ptr, integers_ptr, vocab_size,
    num_chunks, pdl: tl.constexpr, chunks_block: tl.constexpr,
):  # fmt: skip
    """First state of row program_id(0)."""
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    tl.store(num_listed_ptr + row, 0)
    kind = tl.full((), UNFILTERED, dtype=tl.int32)
    zero = tl.full((), 0.0, dtype=tl.float32)
    row_max, scale, low, high, floor = zero, zero, zero, zero, zero
    total = tl.full((), 0.0, dtype=tl.float64)
    target = total
    if slot >= 0:
        temperature = tl.load(floats_ptr + slot * NUM_FLOATS + TEMPERATURE)
        top_p = tl.load(floats_ptr + slot * NUM_FLOATS + TOP_P)
        floor = tl.minimum(tl.load(floats_ptr + slot * NUM_FLOATS + MIN_P), 1.0)
        top_k = tl.load(integers_ptr + slot * NUM_INTEGERS + TOP_K)
        if (temperature > 0) & ((top_k < vocab_size) | (top_p < 1.0) | (floor > 0.0)):
            chunks = tl.arange(0, chunks_block)
            inside = chunks < num_chunks
            chunk_max_ptr += row * num_chunks
            chunk_max = tl.load(chunk_max_ptr + chunks, mask=inside, other=float("-inf"))
            chunk_sum = tl.load(chunk_sum_ptr + row * num_chunks + chunks, mask=inside, other=0.0)
            row_max = tl.max(chunk_max, axis=0)
            scale = LOG2_E / temperature
            total = tl.sum(chunk_weights(chunk_max, chunk_sum, row_max, scale), axis=0)
            target = top_k.to(tl.float64)
            if (total > 0) & (total < float("inf")):
                kind, low, high = _first_bounds(
                    chunk_max_ptr, row_max, scale, total, top_k, top_p, floor, vocab_size, num_chunks, chunks_block
                )
    nothing = total * 0.0
    _store_state(
        state_ptr + row * STATE_SIZE, kind, row_max, scale, low, high, nothing + vocab_size, nothing, total, nothing,
        target, floor,
    )  # fmt: skip


@triton.jit
def _first_bounds(
    chunk_max_ptr, row_max, scale, total, top_k, top_p, floor, vocab_size, num_chunks, chunks_block: tl.constexpr
):  # fmt: skip
    """(kind, LOW, HIGH) of a row with filters, from its chunks alone."""
    cuts_count, cuts_mass = top_k < vocab_size, top_p < 1.0
    few = cuts_count & (top_k <= num_chunks)
    kind = tl.where(cuts_count, tl.where(cuts_mass, WHOLE, BY_COUNT), tl.where(cuts_mass, BY_MASS, KNOWN))
    kind = tl.where(few | ((vocab_size <= LIST_SIZE) & (kind != KNOWN)), LISTED, kind)
    high = tl.where(kind == KNOWN, floor, AFTER_ONE)
    low = floor
    if few:
        # As many weights as chunks are at least as large as the k-th largest maximum of a chunk.
        bound = largest_threshold(
            chunk_max_ptr, num_chunks, row_max, scale, True, 0.0, top_k, floor * 0.0, high, chunks_block
        )
        low = tl.maximum(floor, bound)
    if kind == BY_COUNT:
        low = tl.maximum(floor, LOWEST_WEIGHT)
    if kind == BY_MASS:
        # All weights under this together are less than what top_p leaves out. What min_p leaves is at least 1.
        mass = tl.where(floor > 0, 1.0, total.to(tl.float32))
        low = tl.maximum(tl.maximum(floor, LOWEST_WEIGHT), (1.0 - top_p) * mass / vocab_size * 0.999)
    return kind, low, high


@triton.jit
def _is_wide(kind, num_low, num_high):
    """Whether what lies between the bounds of a row does not fit the list yet."""
    return ((kind == BY_COUNT) | (kind == BY_MASS)) & (num_low - num_high > LIST_SIZE)


@triton.jit
def _pivots(kind, low, high, num_low, num_high, mass_low, mass_high, target, floor, first: tl.constexpr):
    """float32 [NUM_PIVOTS] weights to measure at. Spread between the bounds in the first round, which measures at
    `floor` and at `low` too; close around where the target is expected in the others."""
    lanes = tl.arange(0, NUM_PIVOTS)
    log_low = tl.log2(low)
    if first:
        left = 1.0 - (lanes - 1).to(tl.float32) / (NUM_PIVOTS - 1)
        pivots = tl.exp2(log_low * tl.where(kind == BY_COUNT, left * left * left, left))
        pivots = tl.where(lanes == 0, floor, tl.where(lanes == 1, low, pivots))
    else:
        # Of masses the share follows the logarithm of the weight, of counts the logarithm of the count does.
        mass_share = (mass_low - target) / (mass_low - mass_high)
        count_share = tl.log2((num_low / target).to(tl.float32)) / tl.log2((num_low / (num_high + 0.5)).to(tl.float32))
        center = tl.where(kind == BY_COUNT, count_share, mass_share.to(tl.float32))
        reach = (lanes // 2).to(tl.float32)
        offsets = 0.012 * tl.exp2(1.6 * reach) * tl.where(lanes % 2 == 0, -1.0, 1.0)
        shares = tl.minimum(tl.maximum(center + offsets, 0.0), 1.0)
        pivots = tl.exp2(log_low + (tl.log2(high) - log_low) * shares)
    return pivots


@triton.jit
def _refined(
    state_ptr, pivots_ptr, counts_ptr, masses_ptr, top_p, num_spans, first: tl.constexpr, spans_block: tl.constexpr
):  # fmt: skip
    """State of a row after a round; the state before it where the round had nothing to do."""
    kind, row_max, scale, low, high, num_low, num_high, mass_low, mass_high, target, floor = load_state(state_ptr)
    if _is_wide(kind, num_low, num_high):
        lanes = tl.arange(0, NUM_PIVOTS)
        spans = tl.arange(0, spans_block)
        offsets = spans[:, None] * NUM_PIVOTS + lanes[None, :]
        inside = (spans < num_spans)[:, None] & (lanes >= 0)[None, :]
        pivots = tl.load(pivots_ptr + lanes)
        counts = tl.sum(tl.load(counts_ptr + offsets, mask=inside, other=0), axis=0).to(tl.float64)
        masses = tl.sum(tl.load(masses_ptr + offsets, mask=inside, other=0.0).to(tl.float64), axis=0)
        if first:
            kept = tl.sum(tl.where(lanes == 0, masses, 0.0), axis=0)
            target = tl.where(kind == BY_MASS, top_p.to(tl.float64) * kept, target)
        enough = tl.where(kind == BY_COUNT, counts, masses) >= target
        between = (pivots >= low) & (pivots < high)
        lower, upper = between & enough, between & (enough == 0)
        num_low = tl.min(tl.where(lower, counts, num_low), axis=0)
        mass_low = tl.min(tl.where(lower, masses, mass_low), axis=0)
        num_high = tl.max(tl.where(upper, counts, num_high), axis=0)
        mass_high = tl.max(tl.where(upper, masses, mass_high), axis=0)
        low = tl.max(tl.where(lower, pivots, low), axis=0)
        high = tl.min(tl.where(upper, pivots, high), axis=0)
        # Even `low` does not make the target: fewer tokens than top_k have any weight.
        num_low = tl.where(high <= low, num_high, num_low)
    return kind, row_max, scale, low, high, num_low, num_high, mass_low, mass_high, target, floor


@triton.jit
def narrow_kernel(
    next_state_ptr, next_pivots_ptr, next_counts_ptr, next_masses_ptr, state_ptr, pivots_ptr, counts_ptr, masses_ptr,
    logits_ptr, slots_ptr, floats_ptr, row_stride, vocab_size, round_index: tl.constexpr, pdl: tl.constexpr,
    spans_block: tl.constexpr,
):  # fmt: skip
    """Measures span program_id(0) of row program_id(1) above new pivots, if the bounds of the row still lie far apart
    after the rounds before. The last measures belong to `state_ptr`; the state that they lead to is kept."""
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    span, row = tl.program_id(0), tl.program_id(1)
    num_spans = tl.num_programs(0)
    slot = tl.load(slots_ptr + row)
    partial = (row * num_spans + span) * NUM_PIVOTS
    state_ptr += row * STATE_SIZE
    if slot >= 0:
        if round_index == 0:
            kind, row_max, scale, low, high, num_low, num_high, mass_low, mass_high, target, floor = load_state(
                state_ptr
            )
        else:
            top_p = tl.load(floats_ptr + slot * NUM_FLOATS + TOP_P)
            measured = row * num_spans * NUM_PIVOTS
            kind, row_max, scale, low, high, num_low, num_high, mass_low, mass_high, target, floor = _refined(
                state_ptr, pivots_ptr + row * NUM_PIVOTS, counts_ptr + measured, masses_ptr + measured, top_p,
                num_spans, round_index == 1, spans_block,
            )  # fmt: skip
            if span == 0:
                _store_state(
                    next_state_ptr + row * STATE_SIZE, kind, row_max, scale, low, high, num_low, num_high, mass_low,
                    mass_high, target, floor,
                )  # fmt: skip
        if _is_wide(kind, num_low, num_high):
            pivots = _pivots(kind, low, high, num_low, num_high, mass_low, mass_high, target, floor, round_index == 0)
            lanes = tl.arange(0, NUM_PIVOTS)
            if span == 0:
                tl.store(next_pivots_ptr + row * NUM_PIVOTS + lanes, pivots)
            tokens = span * SPAN + tl.arange(0, SPAN)
            row_ptr = logits_ptr + row.to(tl.int64) * row_stride
            logits = tl.load(row_ptr + tokens, mask=tokens < vocab_size, other=float("-inf"))
            weights = weights_of(logits, row_max, scale)
            for lane in tl.static_range(NUM_PIVOTS):
                above = weights >= tl.sum(tl.where(lanes == lane, pivots, 0.0), axis=0)
                tl.store(next_counts_ptr + partial + lane, tl.sum(above.to(tl.int32), axis=0))
                tl.store(next_masses_ptr + partial + lane, tl.sum(tl.where(above, weights, 0.0), axis=0))


@triton.jit(do_not_specialize=["num_chunks"])
def collect_kernel(
    next_state_ptr, chunk_kept_ptr, num_listed_ptr, listed_logits_ptr, listed_tokens_ptr, state_ptr, pivots_ptr,
    counts_ptr, masses_ptr, logits_ptr, slots_ptr, floats_ptr, row_stride, vocab_size, num_chunks,
    num_rounds: tl.constexpr, pdl: tl.constexpr, spans_block: tl.constexpr,
):  # fmt: skip
    """Span program_id(0) of row program_id(1), if it has filters: the sum of the weights of each chunk that are kept
    for certain, and those between the bounds to the list. Counts also what no longer fits the list."""
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    span, row = tl.program_id(0), tl.program_id(1)
    num_spans = tl.num_programs(0)
    slot = tl.load(slots_ptr + row)
    state_ptr += row * STATE_SIZE
    if slot >= 0:
        top_p = tl.load(floats_ptr + slot * NUM_FLOATS + TOP_P)
        measured = row * num_spans * NUM_PIVOTS
        kind, row_max, scale, low, high, num_low, num_high, mass_low, mass_high, target, floor = _refined(
            state_ptr, pivots_ptr + row * NUM_PIVOTS, counts_ptr + measured, masses_ptr + measured, top_p, num_spans,
            num_rounds == 1, spans_block,
        )  # fmt: skip
        if span == 0:
            _store_state(
                next_state_ptr + row * STATE_SIZE, kind, row_max, scale, low, high, num_low, num_high, mass_low,
                mass_high, target, floor,
            )  # fmt: skip
        if kind != UNFILTERED:
            _collect_span(
                chunk_kept_ptr + row * num_chunks, num_listed_ptr + row, listed_logits_ptr + row * LIST_SIZE,
                listed_tokens_ptr + row * LIST_SIZE, logits_ptr + row.to(tl.int64) * row_stride, row_max, scale, low,
                high, span, vocab_size, num_chunks,
            )  # fmt: skip


@triton.jit
def _collect_span(
    chunk_kept_ptr, num_listed_ptr, listed_logits_ptr, listed_tokens_ptr, row_ptr, row_max, scale, low, high, span,
    vocab_size, num_chunks,
):  # fmt: skip
    """The work of `collect_kernel` on a row with filters; pointers are those of the row."""
    logits = load_span(row_ptr, span, vocab_size)
    tokens = span_offsets(span)
    weights = weights_of(logits, row_max, scale)
    chunks = span * SPAN_CHUNKS + tl.arange(0, SPAN_CHUNKS)
    kept = tl.sum(tl.where(weights >= high, weights, 0.0), axis=1)
    tl.store(chunk_kept_ptr + chunks, kept, mask=chunks < num_chunks)
    listed = ((weights >= low) & (weights < high) & (tokens < vocab_size)).to(tl.int32)
    in_chunks = tl.sum(listed, axis=1)
    count = tl.sum(in_chunks, axis=0)
    if count > 0:
        start = tl.atomic_add(num_listed_ptr, count, sem="relaxed")
        if start + count <= LIST_SIZE:
            before = tl.cumsum(in_chunks, axis=0) - in_chunks
            places = start + before[:, None] + tl.cumsum(listed, axis=1) - listed
            tl.store(listed_logits_ptr + places, logits, mask=listed != 0)
            tl.store(listed_tokens_ptr + places, tokens, mask=listed != 0)
