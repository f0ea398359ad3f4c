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
from tokenmill_kernels.gpu.sampling_math import AFTER_ONE, LOG2_E, LOWEST_WEIGHT, weights_of

CHUNK = tl.constexpr(128)
"""Neighbouring tokens with one maximum and one sum."""
SPAN_CHUNKS = tl.constexpr(32)
SPAN = tl.constexpr(32 * 128)
"""Tokens with one measure."""
_TILE_CHUNKS = tl.constexpr(16)
"""Chunks that `collect` looks at together."""
NUM_PIVOTS = tl.constexpr(8)
LIST_SIZE = tl.constexpr(4096)
COUNTER_STRIDE = tl.constexpr(32)
"""Counters of lists stand so far apart, each in a cache line of its own."""
STATE_SIZE = tl.constexpr(16)

TEMPERATURE = tl.constexpr(columns.TEMPERATURE)
TOP_P = tl.constexpr(columns.TOP_P)
MIN_P = tl.constexpr(columns.MIN_P)
TOP_K = tl.constexpr(columns.TOP_K)
SEED = tl.constexpr(columns.SEED)
NUM_FLOATS = tl.constexpr(columns.NUM_FLOATS)
NUM_INTEGERS = tl.constexpr(columns.NUM_INTEGERS)

# Kinds of rows.
UNFILTERED = tl.constexpr(0)
KNOWN = tl.constexpr(1)
"""The lower bound is the threshold."""
LISTED = tl.constexpr(2)
"""All weights of at least the lower bound go to the list."""
BY_COUNT = tl.constexpr(3)
"""The threshold is the largest weight that keeps top_k."""
BY_MASS = tl.constexpr(4)
"""The threshold is the largest weight that keeps the share top_p of the mass that min_p leaves."""
BY_BOTH = tl.constexpr(5)
"""First by count; but all weights above that threshold go to the list, and the draw cuts them by mass."""


@triton.jit
def span_tokens(span):
    """int32 [SPAN_CHUNKS, CHUNK]: the tokens of a span."""
    chunks = span * SPAN_CHUNKS + tl.arange(0, SPAN_CHUNKS)
    return chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]


@triton.jit
def load_span(row_ptr, span, vocab_size):
    """float32 [SPAN_CHUNKS, CHUNK] logits of a span, minus infinity past the end."""
    tokens = span_tokens(span)
    return tl.load(row_ptr + tokens, mask=tokens < vocab_size, other=float("-inf"))


@triton.jit(do_not_specialize=["slots_ptr", "num_chunks"])
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
def _store_state(state_ptr, kind, row_max, scale, low, high, measure_low, measure_high, target, floor):
    """Keeps what is known about a row.

    row_max, scale: turn logits into weights.
    low, high: the threshold is at least `low` and less than `high`.
    measure_low: number of the weights of at least `low` or, in a search by mass, their sum; or more than that.
    measure_high: the same of `high`, exactly.
    target: what the weights of at least the threshold must make.
    floor: weights under this are cut by min_p.
    """
    tl.store(state_ptr, kind.to(tl.float64))
    tl.store(state_ptr + 1, row_max.to(tl.float64))
    tl.store(state_ptr + 2, scale.to(tl.float64))
    tl.store(state_ptr + 3, low.to(tl.float64))
    tl.store(state_ptr + 4, high.to(tl.float64))
    tl.store(state_ptr + 5, measure_low)
    tl.store(state_ptr + 6, measure_high)
    tl.store(state_ptr + 7, target)
    tl.store(state_ptr + 8, floor.to(tl.float64))


@triton.jit
def load_state(state_ptr):
    """What `_store_state` keeps, in its order."""
    return (
        tl.load(state_ptr).to(tl.int32),
        tl.load(state_ptr + 1).to(tl.float32),
        tl.load(state_ptr + 2).to(tl.float32),
        tl.load(state_ptr + 3).to(tl.float32),
        tl.load(state_ptr + 4).to(tl.float32),
        tl.load(state_ptr + 5),
        tl.load(state_ptr + 6),
        tl.load(state_ptr + 7),
        tl.load(state_ptr + 8).to(tl.float32),
    )


@triton.jit(do_not_specialize=["slots_ptr", "num_chunks"])
def plan_kernel(
    state_ptr, num_listed_ptr, chunk_max_ptr, chunk_sum_ptr, slots_ptr, floats_ptr, integers_ptr, vocab_size,
    num_chunks, pdl: tl.constexpr, chunks_block: tl.constexpr,
):  # fmt: skip
    """First state of row program_id(0)."""
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    tl.store(num_listed_ptr + row * COUNTER_STRIDE, 0)
    kind = tl.full((), UNFILTERED, dtype=tl.int32)
    zero = tl.full((), 0.0, dtype=tl.float32)
    row_max, scale, low, high, floor = zero, zero, zero, zero, zero
    measure = tl.full((), 0.0, dtype=tl.float64)
    target = measure
    if slot >= 0:
        temperature = tl.load(floats_ptr + slot * NUM_FLOATS + TEMPERATURE)
        top_p = tl.load(floats_ptr + slot * NUM_FLOATS + TOP_P)
        floor = tl.minimum(tl.load(floats_ptr + slot * NUM_FLOATS + MIN_P), 1.0)
        top_k = tl.load(integers_ptr + slot * NUM_INTEGERS + TOP_K)
        if (temperature > 0) & ((top_k < vocab_size) | (top_p < 1.0) | (floor > 0.0)):
            chunks = tl.arange(0, chunks_block)
            inside = chunks < num_chunks
            chunk_max = tl.load(chunk_max_ptr + row * num_chunks + chunks, mask=inside, other=float("-inf"))
            chunk_sum = tl.load(chunk_sum_ptr + row * num_chunks + chunks, mask=inside, other=0.0)
            row_max = tl.max(chunk_max, axis=0)
            scale = LOG2_E / temperature
            total = tl.sum(chunk_weights(chunk_max, chunk_sum, row_max, scale), axis=0)
            if (total > 0) & (total < float("inf")):
                kind, low, high = _first_bounds(
                    weights_of(chunk_max, row_max, scale), total.to(tl.float32), top_k, top_p, floor, vocab_size,
                    num_chunks,
                )  # fmt: skip
                measure = tl.where(kind == BY_MASS, total, vocab_size)
                target = tl.where(kind == BY_MASS, top_p.to(tl.float64) * total, top_k.to(tl.float64))
    _store_state(state_ptr + row * STATE_SIZE, kind, row_max, scale, low, high, measure, measure * 0.0, target, floor)


@triton.jit
def _first_bounds(chunk_max, total, top_k, top_p, floor, vocab_size, num_chunks):
    """(kind, low, high) of a row with filters, from the largest weight of each of its chunks and the sum of all."""
    cuts_count, cuts_mass = top_k < vocab_size, top_p < 1.0
    kind = tl.where(cuts_count, tl.where(cuts_mass, BY_BOTH, BY_COUNT), tl.where(cuts_mass, BY_MASS, KNOWN))
    high = tl.where(kind == KNOWN, floor, AFTER_ONE)
    low = floor
    # As many weights as chunks are at least as large as the k-th largest maximum of a chunk.
    few = cuts_count & (top_k <= num_chunks)
    if few:
        low = tl.maximum(floor, _lower_bound(chunk_max, top_k))
    # No more than total / floor weights are of at least `floor`.
    few |= (kind != KNOWN) & ((vocab_size <= LIST_SIZE) | (total <= floor * LIST_SIZE))
    if few:
        kind = tl.where(few, LISTED, kind)
    elif kind == BY_MASS:
        # All weights under this together are less than what top_p leaves out. What min_p leaves is at least 1.
        mass = tl.where(floor > 0, 1.0, total)
        low = tl.maximum(tl.maximum(floor, LOWEST_WEIGHT), (1.0 - top_p) * mass / vocab_size * 0.999)
    elif kind != KNOWN:
        low = tl.maximum(floor, LOWEST_WEIGHT)
    return kind, low, high


@triton.jit
def _lower_bound(weights, k):
    """A weight of which at least `k` of `weights` are no smaller, within 1 % of the largest that is."""
    bits = weights.to(tl.int32, bitcast=True)
    bound = tl.full((), 0, dtype=tl.int32)
    for place in tl.static_range(14):
        longer = bound | (1 << (29 - place))
        bound = tl.where(tl.sum((bits >= longer).to(tl.int32), axis=0) >= k, longer, bound)
    return bound.to(tl.float32, bitcast=True)


@triton.jit
def _is_wide(kind, low, measure_low, measure_high):
    """Whether what must go to the list does not fit there yet. A mass is that of fewer weights than it is of `low`."""
    between = tl.where(kind == BY_BOTH, measure_low, measure_low - measure_high)
    return (kind >= BY_COUNT) & (between > LIST_SIZE * tl.where(kind == BY_MASS, low, 1.0))


@triton.jit
def _first_pivots(kind, low, floor):
    """float32 [NUM_PIVOTS] weights above 0 to measure at, spread between `low` and the largest."""
    lanes = tl.arange(0, NUM_PIVOTS)
    by_mass = kind == BY_MASS
    left = 1.0 - (lanes + 1).to(tl.float32) / (NUM_PIVOTS + 1)
    pivots = tl.exp2(tl.log2(low) * tl.where(by_mass, left, left * left * left))
    # The mass that min_p leaves, and whether as many tokens have any weight as top_k asks for.
    asks = (kind != BY_MASS) | (floor > 0)
    return tl.where((lanes == 0) & asks, tl.where(by_mass, floor, low), pivots)


@triton.jit
def _closer_pivots(kind, low, high, measure_low, measure_high, target):
    """float32 [NUM_PIVOTS] weights between the bounds to measure at, around where the target is expected."""
    # Where weights are spread evenly over their logarithm, the mass above a weight is linear in the weight. Of counts
    # the logarithm is taken to be linear in that of the weight.
    log_low = tl.log2(low)
    log_range = tl.log2(high) - log_low
    share = ((target - measure_high) / (measure_low - measure_high)).to(tl.float32)
    mass_center = (tl.log2(high - (high - low) * share) - log_low) / log_range
    count_range = tl.log2((measure_low / (measure_high + 0.5)).to(tl.float32))
    count_center = tl.log2((measure_low / target).to(tl.float32)) / count_range
    lanes = tl.arange(0, NUM_PIVOTS)
    offsets = 0.008 * tl.exp2(1.7 * (lanes // 2).to(tl.float32)) * tl.where(lanes % 2 == 0, -1.0, 1.0)
    shares = tl.minimum(tl.maximum(tl.where(kind == BY_MASS, mass_center, count_center) + offsets, 0.0), 1.0)
    return tl.exp2(log_low + log_range * shares)


@triton.jit
def _refined(state_ptr, pivots_ptr, measures_ptr, top_p, num_spans, num_rounds, spans_block: tl.constexpr):
    """State of a row after `num_rounds`; the state before the last of them where that had nothing to do."""
    kind, row_max, scale, low, high, measure_low, measure_high, target, floor = load_state(state_ptr)
    if (num_rounds > 0) & _is_wide(kind, low, measure_low, measure_high):
        lanes = tl.arange(0, NUM_PIVOTS)
        spans = tl.arange(0, spans_block)
        offsets = spans[:, None] * NUM_PIVOTS + lanes[None, :]
        inside = (spans < num_spans)[:, None] & (lanes >= 0)[None, :]
        pivots = tl.load(pivots_ptr + lanes)
        measures = tl.sum(tl.load(measures_ptr + offsets, mask=inside, other=0.0).to(tl.float64), axis=0)
        kept = tl.sum(tl.where(lanes == 0, measures, 0.0), axis=0)
        asked = (num_rounds == 1) & (kind == BY_MASS) & (floor > 0)
        target = tl.where(asked, top_p.to(tl.float64) * kept, target)
        between = (pivots >= low) & (pivots < high)
        lower, upper = between & (measures >= target), between & (measures < target)
        measure_low = tl.min(tl.where(lower, measures, measure_low), axis=0)
        measure_high = tl.max(tl.where(upper, measures, measure_high), axis=0)
        low = tl.max(tl.where(lower, pivots, low), axis=0)
        high = tl.min(tl.where(upper, pivots, high), axis=0)
        # Even `low` does not make the target: fewer tokens than top_k have any weight.
        measure_low = tl.where(high <= low, measure_high, measure_low)
    return kind, row_max, scale, low, high, measure_low, measure_high, target, floor


@triton.jit(do_not_specialize=["slots_ptr", "num_chunks", "num_spans", "num_rounds"])
def narrow_kernel(
    next_state_ptr, next_pivots_ptr, next_measures_ptr, state_ptr, pivots_ptr, measures_ptr, chunk_max_ptr, logits_ptr,
    slots_ptr, floats_ptr, row_stride, vocab_size, num_chunks, num_spans, num_rounds, pdl: tl.constexpr,
    spans_block: tl.constexpr,
):  # fmt: skip
    """Measures spans program_id(0), program_id(0) + programs, ... of row program_id(1) above new pivots, if the bounds
    of the row still lie far apart after `num_rounds`. The measures of the last round belong to `state_ptr`; the state
    that they lead to is kept."""
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    program, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    measures_row = row * num_spans * NUM_PIVOTS
    if slot >= 0:
        kind, row_max, scale, low, high, measure_low, measure_high, target, floor = _refined(
            state_ptr + row * STATE_SIZE, pivots_ptr + row * NUM_PIVOTS, measures_ptr + measures_row,
            tl.load(floats_ptr + slot * NUM_FLOATS + TOP_P), num_spans, num_rounds, spans_block,
        )  # fmt: skip
        if program == 0:
            _store_state(
                next_state_ptr + row * STATE_SIZE, kind, row_max, scale, low, high, measure_low, measure_high, target,
                floor,
            )  # fmt: skip
        if _is_wide(kind, low, measure_low, measure_high):
            if num_rounds == 0:
                pivots = _first_pivots(kind, low, floor)
            else:
                pivots = _closer_pivots(kind, low, high, measure_low, measure_high, target)
            if program == 0:
                tl.store(next_pivots_ptr + row * NUM_PIVOTS + tl.arange(0, NUM_PIVOTS), pivots)
            for span in range(program, num_spans, tl.num_programs(0)):
                _measure_span(
                    next_measures_ptr + measures_row + span * NUM_PIVOTS, chunk_max_ptr + row * num_chunks,
                    logits_ptr + row.to(tl.int64) * row_stride, pivots, kind != BY_MASS, row_max, scale, span,
                    vocab_size, num_chunks,
                )  # fmt: skip


@triton.jit
def _measure_span(
    measures_ptr, chunk_max_ptr, row_ptr, pivots, by_count, row_max, scale, span, vocab_size, num_chunks
):  # fmt: skip
    """Number, or sum, of the weights of a span above each pivot; looks only into chunks that have any."""
    chunks = span * SPAN_CHUNKS + tl.arange(0, SPAN_CHUNKS)
    chunk_max = tl.load(chunk_max_ptr + chunks, mask=chunks < num_chunks, other=float("-inf"))
    in_question = weights_of(chunk_max, row_max, scale) >= tl.min(pivots, axis=0)
    lanes = tl.arange(0, NUM_PIVOTS)
    tokens = span_tokens(span)
    logits = tl.load(row_ptr + tokens, mask=in_question[:, None] & (tokens < vocab_size), other=float("-inf"))
    weights = weights_of(logits, row_max, scale)
    values = tl.where(by_count, 1.0, weights)
    for lane in tl.static_range(NUM_PIVOTS):
        pivot = tl.sum(tl.where(lanes == lane, pivots, 0.0), axis=0)
        tl.store(measures_ptr + lane, tl.sum(tl.where(weights >= pivot, values, 0.0)))


@triton.jit(do_not_specialize=["slots_ptr", "num_chunks", "num_spans", "num_rounds"])
def collect_kernel(
    next_state_ptr, chunk_kept_ptr, num_listed_ptr, listed_logits_ptr, listed_tokens_ptr, state_ptr, pivots_ptr,
    measures_ptr, chunk_max_ptr, logits_ptr, slots_ptr, floats_ptr, row_stride, vocab_size, num_chunks, num_spans,
    num_rounds, pdl: tl.constexpr, spans_block: tl.constexpr,
):  # fmt: skip
    """Of tiles program_id(0), program_id(0) + programs, ... of row program_id(1), if it has filters: the sum of the
    weights of each chunk that are kept for certain, and to the list those between the bounds. A list that does not hold
    them all has a larger count."""
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    program, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        kind, row_max, scale, low, high, measure_low, measure_high, target, floor = _refined(
            state_ptr + row * STATE_SIZE, pivots_ptr + row * NUM_PIVOTS,
            measures_ptr + row * num_spans * NUM_PIVOTS, tl.load(floats_ptr + slot * NUM_FLOATS + TOP_P), num_spans,
            num_rounds, spans_block,
        )  # fmt: skip
        if program == 0:
            _store_state(
                next_state_ptr + row * STATE_SIZE, kind, row_max, scale, low, high, measure_low, measure_high, target,
                floor,
            )  # fmt: skip
        num_listed_ptr += row * COUNTER_STRIDE
        if _is_wide(kind, low, measure_low, measure_high):
            if program == 0:
                tl.store(num_listed_ptr, LIST_SIZE + 1)
        elif kind != UNFILTERED:
            for tile in range(program, tl.cdiv(num_chunks, _TILE_CHUNKS), tl.num_programs(0)):
                _collect_tile(
                    chunk_kept_ptr + row * num_chunks, num_listed_ptr, listed_logits_ptr + row * LIST_SIZE,
                    listed_tokens_ptr + row * LIST_SIZE, chunk_max_ptr + row * num_chunks,
                    logits_ptr + row.to(tl.int64) * row_stride, row_max, scale, low,
                    tl.where(kind == BY_BOTH, AFTER_ONE, high), tile, vocab_size, num_chunks,
                )  # fmt: skip


@triton.jit
def _collect_tile(
    chunk_kept_ptr, num_listed_ptr, listed_logits_ptr, listed_tokens_ptr, chunk_max_ptr, row_ptr, row_max, scale, low,
    high, tile, vocab_size, num_chunks,
):  # fmt: skip
    """The work of `collect_kernel` on a few chunks; pointers are those of the row."""
    chunks = tile * _TILE_CHUNKS + tl.arange(0, _TILE_CHUNKS)
    chunk_max = tl.load(chunk_max_ptr + chunks, mask=chunks < num_chunks, other=float("-inf"))
    in_question = weights_of(chunk_max, row_max, scale) >= low
    # Neighbours change places, so that the compiler sees no run of tokens and lets each thread load single ones, as the
    # scattered stores below need them: to bring wide loads into that layout would cost more than they gain. Of two
    # dimensions without runs it gives the lanes of a warp the first.
    tokens = (tl.arange(0, CHUNK) ^ 1)[:, None] + chunks[None, :] * CHUNK
    logits = tl.load(row_ptr + tokens, mask=in_question[None, :] & (tokens < vocab_size), other=float("-inf"))
    weights = weights_of(logits, row_max, scale)
    kept = tl.sum(tl.where(weights >= high, weights, 0.0), axis=0)
    tl.store(chunk_kept_ptr + chunks, kept.to(tl.float64), mask=chunks < num_chunks)
    listed = ((weights >= low) & (weights < high) & (tokens < vocab_size)).to(tl.int32)
    in_lanes = tl.sum(listed, axis=1)
    count = tl.sum(in_lanes, axis=0)
    if count > 0:
        start = tl.atomic_add(num_listed_ptr, count, sem="relaxed")
        if start + count <= LIST_SIZE:
            ends = (tl.cumsum(in_lanes, axis=0) - in_lanes)[:, None] + tl.cumsum(listed, axis=1)
            tl.store(listed_logits_ptr + start + ends - 1, logits, mask=listed != 0)
            tl.store(listed_tokens_ptr + start + ends - 1, tokens, mask=listed != 0)
