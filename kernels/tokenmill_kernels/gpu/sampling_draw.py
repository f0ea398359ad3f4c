"""The last step of a row: the largest logit, or the token at which the running sum of the kept weights exceeds the
row's uniform number times their total."""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from tokenmill_kernels.gpu.launch import let_dependents_start, wait_for_inputs
from tokenmill_kernels.gpu.sampling_math import AFTER_ONE, LOG2_E, find_threshold, uniform, weights_of
from tokenmill_kernels.gpu.sampling_search import (
    BY_BOTH,
    BY_COUNT,
    BY_MASS,
    CHUNK,
    COUNTER_STRIDE,
    LIST_SIZE,
    LISTED,
    NUM_FLOATS,
    NUM_INTEGERS,
    SEED,
    SPAN_CHUNKS,
    STATE_SIZE,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    UNFILTERED,
    chunk_weights,
    load_span,
    load_state,
)

_BLOCK = tl.constexpr(1024)


@triton.jit
def _first_largest(row_ptr, row_max, chunk_max, chunks, vocab_size):
    """Lowest token whose logit is `row_max`."""
    chunk = tl.min(tl.where(chunk_max == row_max, chunks, 0x7FFFFFFF), axis=0)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(row_ptr + tokens, mask=tokens < vocab_size, other=float("-inf"))
    return tl.min(tl.where(logits == row_max, tokens, 0x7FFFFFFF), axis=0)


@triton.jit
def _mass_above(logits_ptr, num_logits, row_max, scale, threshold, block: tl.constexpr):
    """float64: sum of the weights of at least `threshold`."""
    lanes = tl.arange(0, block)
    sums = tl.zeros((block,), dtype=tl.float64)
    for start in range(0, num_logits, block):
        logits = tl.load(logits_ptr + start + lanes, mask=start + lanes < num_logits, other=float("-inf"))
        weights = weights_of(logits, row_max, scale)
        sums += tl.where(weights >= threshold, weights, 0.0).to(tl.float64)
    return tl.sum(sums, axis=0)


@triton.jit
def _keep_row(chunk_kept_ptr, row_ptr, row_max, scale, threshold, vocab_size, num_chunks):
    """Sums of the kept weights of every chunk of a row, by one program."""
    for span in range(tl.cdiv(num_chunks, SPAN_CHUNKS)):
        weights = weights_of(load_span(row_ptr, span, vocab_size), row_max, scale)
        chunks = span * SPAN_CHUNKS + tl.arange(0, SPAN_CHUNKS)
        kept = tl.sum(tl.where(weights >= threshold, weights, 0.0), axis=1)
        tl.store(chunk_kept_ptr + chunks, kept.to(tl.float64), mask=chunks < num_chunks)
    tl.debug_barrier()


@triton.jit
def _keep_listed(chunk_kept_ptr, logits_ptr, tokens_ptr, num_listed, row_max, scale, threshold, block: tl.constexpr):
    """Adds the kept weights of a list to the sums of their chunks. Sums of a few float32 are exact in float64: their
    order does not matter."""
    lanes = tl.arange(0, block)
    for start in range(0, num_listed, block):
        inside = start + lanes < num_listed
        logits = tl.load(logits_ptr + start + lanes, mask=inside, other=float("-inf"))
        tokens = tl.load(tokens_ptr + start + lanes, mask=inside, other=0)
        weights = weights_of(logits, row_max, scale)
        kept = inside & (weights >= threshold)
        tl.atomic_add(chunk_kept_ptr + tokens // CHUNK, weights.to(tl.float64), mask=kept, sem="relaxed")
    tl.debug_barrier()


@triton.jit
def _threshold(logits_ptr, num_logits, whole, state_ptr, top_k, top_p, vocab_size):
    """Smallest weight that the filters of a row keep, from its list, or from the `whole` row."""
    kind, row_max, scale, low, high, _measure_low, measure_high, target, _floor = load_state(state_ptr)
    threshold = low
    if (kind == BY_COUNT) | (kind == BY_MASS):
        base = tl.where(whole, 0.0, measure_high)
        threshold = find_threshold(
            logits_ptr, num_logits, row_max, scale, kind == BY_COUNT, base, target, low, high, _BLOCK
        )
    if (kind == LISTED) | (kind == BY_BOTH):
        end = low * 0.0 + AFTER_ONE
        if top_k < vocab_size:
            threshold = find_threshold(logits_ptr, num_logits, row_max, scale, True, 0.0, top_k, low, end, _BLOCK)
        if top_p < 1.0:
            mass = _mass_above(logits_ptr, num_logits, row_max, scale, threshold, _BLOCK)
            threshold = find_threshold(
                logits_ptr, num_logits, row_max, scale, False, 0.0, top_p.to(tl.float64) * mass, threshold, end, _BLOCK
            )
    return threshold


@triton.jit
def _token_in_chunk(row_ptr, chunk, remaining, row_max, scale, threshold, vocab_size):
    """First token of a chunk at which the running sum of the kept weights exceeds `remaining`; else the last kept."""
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(row_ptr + tokens, mask=tokens < vocab_size, other=float("-inf"))
    weights = weights_of(logits, row_max, scale)
    kept = (weights >= threshold) & (weights > 0)
    ends = tl.cumsum(tl.where(kept, weights, 0.0).to(tl.float64), axis=0)
    first = tl.min(tl.where(kept & (ends > remaining), tokens, 0x7FFFFFFF), axis=0)
    return tl.minimum(first, tl.max(tl.where(kept, tokens, -1), axis=0))


@triton.jit
def _draw(row_ptr, chunk_mass, chunks, u, row_max, scale, threshold, vocab_size):
    """Token of a row by inverse cumulative distribution: first its chunk, then its place there. A chunk or a token
    without mass is never found, whatever rounding does."""
    ends = tl.cumsum(chunk_mass, axis=0)
    target = u * tl.sum(chunk_mass, axis=0)
    last = tl.max(tl.where(chunk_mass > 0, chunks, -1), axis=0)
    chunk = tl.minimum(tl.min(tl.where((chunk_mass > 0) & (ends > target), chunks, 0x7FFFFFFF), axis=0), last)
    remaining = target - tl.sum(tl.where(chunks == chunk, ends - chunk_mass, 0.0), axis=0)
    return _token_in_chunk(row_ptr, chunk, remaining, row_max, scale, threshold, vocab_size)


@triton.jit(do_not_specialize=["slots_ptr", "num_chunks"])
def draw_kernel(
    out_ptr, chunk_max_ptr, chunk_sum_ptr, chunk_kept_ptr, num_listed_ptr, listed_logits_ptr, listed_tokens_ptr,
    state_ptr, logits_ptr, slots_ptr, floats_ptr, integers_ptr, num_tokens_ptr, num_prompt_ptr, row_stride,
    vocab_size, num_chunks, filtered: tl.constexpr, pdl: tl.constexpr, chunks_block: tl.constexpr,
):  # fmt: skip
    """Token of row program_id(0); -1 in padding and where the logits are no distribution."""
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    token = tl.full((), -1, dtype=tl.int32)
    if slot >= 0:
        row_ptr = logits_ptr + row.to(tl.int64) * row_stride
        listed_logits_ptr += row * LIST_SIZE
        listed_tokens_ptr += row * LIST_SIZE
        chunk_kept_ptr += row * num_chunks
        temperature = tl.load(floats_ptr + slot * NUM_FLOATS + TEMPERATURE)
        chunks = tl.arange(0, chunks_block)
        inside = chunks < num_chunks
        chunk_max = tl.load(chunk_max_ptr + row * num_chunks + chunks, mask=inside, other=float("-inf"))
        row_max = tl.max(chunk_max, axis=0)
        if temperature > 0:
            scale = LOG2_E / temperature
            chunk_sum = tl.load(chunk_sum_ptr + row * num_chunks + chunks, mask=inside, other=0.0)
            mass = chunk_weights(chunk_max, chunk_sum, row_max, scale)
            total = tl.sum(mass, axis=0)
            threshold = tl.full((), 0.0, dtype=tl.float32)
            if (total > 0) & (total < float("inf")):
                if filtered:
                    kind = tl.load(state_ptr + row * STATE_SIZE).to(tl.int32)
                    if kind != UNFILTERED:
                        num_listed = tl.load(num_listed_ptr + row * COUNTER_STRIDE)
                        top_k = tl.load(integers_ptr + slot * NUM_INTEGERS + TOP_K)
                        top_p = tl.load(floats_ptr + slot * NUM_FLOATS + TOP_P)
                        whole = num_listed > LIST_SIZE
                        source_ptr = tl.where(whole, row_ptr, listed_logits_ptr)
                        threshold = _threshold(
                            source_ptr, tl.where(whole, vocab_size, num_listed), whole, state_ptr + row * STATE_SIZE,
                            top_k, top_p, vocab_size,
                        )  # fmt: skip
                        if whole:
                            _keep_row(chunk_kept_ptr, row_ptr, row_max, scale, threshold, vocab_size, num_chunks)
                        else:
                            _keep_listed(
                                chunk_kept_ptr, listed_logits_ptr, listed_tokens_ptr, num_listed, row_max, scale,
                                threshold, _BLOCK,
                            )  # fmt: skip
                        mass = tl.load(chunk_kept_ptr + chunks, mask=inside, other=0.0)
                u = uniform(
                    tl.load(integers_ptr + slot * NUM_INTEGERS + SEED),
                    tl.load(num_tokens_ptr + slot) - tl.load(num_prompt_ptr + slot),
                )
                token = _draw(row_ptr, mass, chunks, u, row_max, scale, threshold, vocab_size)
        elif (row_max > float("-inf")) & (row_max < float("inf")):
            token = _first_largest(row_ptr, row_max, chunk_max, chunks, vocab_size)
    tl.store(out_ptr + row, token)
