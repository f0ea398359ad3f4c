"""Log-probabilities of tokens, their ranks, and the most likely tokens beside them, from one pass over the logits.

The pass leaves maximum and sum of every chunk of a row, and how many logits are above that of the row's own token. The
largest logits then come out one by one: the best chunk holds the next, and only that chunk is looked into.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from tokenmill_kernels.gpu.launch import launch_options, let_dependents_start, wait_for_inputs
from tokenmill_kernels.gpu.sampling_math import LOG2_E
from tokenmill_kernels.gpu.sampling_search import CHUNK, SPAN, SPAN_CHUNKS, chunk_weights, load_span


@triton.jit(do_not_specialize=["num_chunks"])
def _statistics_kernel(
    chunk_max_ptr, chunk_sum_ptr, above_ptr, logits_ptr, own_ptr, row_stride, vocab_size, num_chunks,
    pdl: tl.constexpr,
):  # fmt: skip
    """Span program_id(0) of row program_id(1)."""
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    span, row = tl.program_id(0), tl.program_id(1)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    own = tl.load(row_ptr + tl.load(own_ptr + row))
    logits = load_span(row_ptr, span, vocab_size)
    tl.store(above_ptr + row * tl.num_programs(0) + span, tl.sum(tl.sum((logits > own).to(tl.int32), axis=1), axis=0))
    logits = tl.where(logits != logits, float("inf"), logits)
    largest = tl.max(logits, axis=1)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2((logits - shift[:, None]) * LOG2_E)
    chunks = span * SPAN_CHUNKS + tl.arange(0, SPAN_CHUNKS)
    tl.store(chunk_max_ptr + row * num_chunks + chunks, largest, mask=chunks < num_chunks)
    tl.store(chunk_sum_ptr + row * num_chunks + chunks, tl.sum(weights, axis=1), mask=chunks < num_chunks)


@triton.jit(do_not_specialize=["num_chunks", "num_top"])
def _scores_kernel(
    ids_ptr, logprobs_ptr, ranks_ptr, chunk_max_ptr, chunk_sum_ptr, above_ptr, logits_ptr, own_ptr, row_stride,
    vocab_size, num_chunks, num_top, pdl: tl.constexpr, chunks_block: tl.constexpr, spans_block: tl.constexpr,
):  # fmt: skip
    """Row program_id(0)."""
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    chunks = tl.arange(0, chunks_block)
    inside = chunks < num_chunks
    chunk_max = tl.load(chunk_max_ptr + row * num_chunks + chunks, mask=inside, other=float("-inf"))
    chunk_sum = tl.load(chunk_sum_ptr + row * num_chunks + chunks, mask=inside, other=0.0)
    row_max = tl.max(chunk_max, axis=0)
    log_total = tl.log(tl.sum(chunk_weights(chunk_max, chunk_sum, row_max, LOG2_E), axis=0)).to(tl.float32)

    num_spans = tl.cdiv(num_chunks, SPAN_CHUNKS)
    spans = tl.arange(0, spans_block)
    above = tl.load(above_ptr + row * num_spans + spans, mask=spans < num_spans, other=0)
    tl.store(ranks_ptr + row, 1 + tl.sum(above, axis=0))
    own = tl.load(own_ptr + row)
    ids_ptr += row * (1 + num_top)
    logprobs_ptr += row * (1 + num_top)
    tl.store(ids_ptr, own.to(tl.int32))
    tl.store(logprobs_ptr, tl.load(row_ptr + own) - row_max - log_total)

    last = tl.full((), float("inf"), dtype=tl.float32)
    last_token = tl.full((), -1, dtype=tl.int32)
    for place in range(1, 1 + num_top):
        best = tl.max(chunk_max, axis=0)
        chunk = tl.min(tl.where(chunk_max == best, chunks, chunks_block), axis=0)
        tokens = chunk * CHUNK + tl.arange(0, CHUNK)
        logits = tl.load(row_ptr + tokens, mask=tokens < vocab_size, other=float("-inf"))
        left = (tokens < vocab_size) & ((logits < last) | ((logits == last) & (tokens > last_token)))
        last = tl.max(tl.where(left, logits, float("-inf")), axis=0)
        # Rows that are not numbers have any token of the vocabulary.
        last_token = tl.min(tl.where(left & (logits == last), tokens, vocab_size - 1), axis=0)
        tl.store(ids_ptr + place, last_token)
        tl.store(logprobs_ptr + place, last - row_max - log_total)
        rest = left & ((logits < last) | (tokens > last_token))
        chunk_max = tl.where(chunks == chunk, tl.max(tl.where(rest, logits, float("-inf")), axis=0), chunk_max)


def score(logits: torch.Tensor, own: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of the tokens `own` int64 [R] under `logits` float32 [R, V] with contiguous rows, beside those
    of the `num_top` most likely tokens, each of which costs a look at one chunk.

    Token ids int32 [R, 1 + num_top], log-probabilities float32 [R, 1 + num_top], not numbers where the logits are no
    distribution, and ranks int32 [R], 1 for the most likely. Of equal logits the lower id comes first.
    """
    num_rows, vocab_size = logits.shape
    device = logits.device
    num_chunks, num_spans = triton.cdiv(vocab_size, CHUNK.value), triton.cdiv(vocab_size, SPAN.value)
    chunk_max, chunk_sum = (torch.empty((num_rows, num_chunks), dtype=torch.float32, device=device) for _ in range(2))
    above = torch.empty((num_rows, num_spans), dtype=torch.int32, device=device)
    token_ids = torch.empty((num_rows, 1 + num_top), dtype=torch.int32, device=device)
    logprobs = torch.empty((num_rows, 1 + num_top), dtype=torch.float32, device=device)
    ranks = torch.empty(num_rows, dtype=torch.int32, device=device)
    options = launch_options(device)
    _statistics_kernel[(num_spans, num_rows)](
        chunk_max, chunk_sum, above, logits, own, logits.stride(0), vocab_size, num_chunks, num_warps=4, **options
    )
    _scores_kernel[(num_rows,)](
        token_ids, logprobs, ranks, chunk_max, chunk_sum, above, logits, own, logits.stride(0), vocab_size, num_chunks,
        num_top, chunks_block=triton.next_power_of_2(num_chunks), spans_block=triton.next_power_of_2(num_spans),
        num_warps=1, **options,
    )  # fmt: skip
    return token_ids, logprobs, ranks
