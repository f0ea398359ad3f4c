"""From logits to the next token of every row, decided on the device.

A fixed chain of launches, whose grids follow from the padded number of rows alone, reads the parameters of each row
from tables by slot. Rows without a feature leave its launches at once. The slots of the rows may begin at any address:
graphs and single steps share one variant of each kernel. min_p and top_k cut the distribution after temperature, top_p
what they leave of it; tokens that tie with the last one kept are kept too. `sampling_search` makes that a threshold.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import torch
import triton

from tokenmill_kernels.gpu import sampling_search as search
from tokenmill_kernels.gpu.argmax import argmax
from tokenmill_kernels.gpu.launch import device_limits, launch_options
from tokenmill_kernels.gpu.sampling_draw import draw_kernel

_NUM_ROUNDS = 3
_PROGRAMS_PER_SM = 8
"""How many look for thresholds, all rows together."""
_NARROW_WARPS, _COLLECT_WARPS = 4, 8
_CHUNK, _SPAN = search.CHUNK.value, search.SPAN.value


@dataclass(frozen=True, slots=True)
class SamplingTables:
    """Parameters and tokens by slot, on the device, contiguous."""

    floats: torch.Tensor
    """float32 [num_slots, NUM_FLOATS], see `sampling_columns`."""
    integers: torch.Tensor
    """int64 [num_slots, NUM_INTEGERS]"""
    token_ids: torch.Tensor
    """int32 [num_slots, max_len]: prompt, then output."""
    num_tokens: torch.Tensor
    """int32 [num_slots]: known tokens."""
    num_prompt: torch.Tensor
    """int32 [num_slots]"""


class Workspace:
    """Memory of the kernels between their launches, for one stream. Graphs that were captured with it need it alive."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.max_rows, self.vocab_size = max_rows, vocab_size
        self.num_chunks = triton.cdiv(vocab_size, _CHUNK)
        self.num_spans = triton.cdiv(vocab_size, _SPAN)
        self.chunk_max, self.chunk_sum = (buffer(max_rows, self.num_chunks) for _ in range(2))
        self.chunk_kept = buffer(max_rows, self.num_chunks, dtype=torch.float64)
        list_size, num_pivots = search.LIST_SIZE.value, search.NUM_PIVOTS.value
        self.num_listed = buffer(max_rows, search.COUNTER_STRIDE.value, dtype=torch.int32)
        self.listed_logits = buffer(max_rows, list_size)
        self.listed_tokens = buffer(max_rows, list_size, dtype=torch.int32)
        self.states = [buffer(max_rows, search.STATE_SIZE.value, dtype=torch.float64) for _ in range(_NUM_ROUNDS + 1)]
        self.pivots = [buffer(max_rows, num_pivots) for _ in range(_NUM_ROUNDS)]
        self.measures = [buffer(max_rows, self.num_spans, num_pivots) for _ in range(_NUM_ROUNDS)]


def choose_tokens(
    logits: torch.Tensor,
    slots: torch.Tensor,
    tables: SamplingTables,
    workspace: Workspace,
    *,
    random: bool,
    filtered: bool,
) -> torch.Tensor:
    """One token for each row of `logits` float32 [R, V] with contiguous rows, by the parameters of `slots` int32 [R].

    int32 [R]; -1 where the slot is negative or the logits are no distribution. `random` and `filtered` say whether rows
    may have a temperature, and with it top_k, top_p or min_p. At most `workspace.max_rows` rows of `vocab_size`.
    """
    if not random:
        return argmax(logits)
    num_rows, vocab_size = logits.shape
    assert num_rows <= workspace.max_rows
    assert vocab_size == workspace.vocab_size
    options = launch_options(logits.device)
    num_chunks = workspace.num_chunks
    grid = (workspace.num_spans, num_rows)
    chunks_block = triton.next_power_of_2(num_chunks)
    search.scan_kernel[grid](
        workspace.chunk_max, workspace.chunk_sum, logits, slots, tables.floats, logits.stride(0), vocab_size,
        num_chunks, num_warps=4, **options,
    )  # fmt: skip
    if filtered:
        _search(logits, slots, tables, workspace)
    token_ids = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    draw_kernel[(num_rows,)](
        token_ids, workspace.chunk_max, workspace.chunk_sum, workspace.chunk_kept, workspace.num_listed,
        workspace.listed_logits, workspace.listed_tokens, workspace.states[-1], logits, slots, tables.floats,
        tables.integers, tables.num_tokens, tables.num_prompt, logits.stride(0), vocab_size, num_chunks,
        filtered=filtered, chunks_block=chunks_block, num_warps=8, **options,
    )  # fmt: skip
    return token_ids


def _search(logits: torch.Tensor, slots: torch.Tensor, tables: SamplingTables, workspace: Workspace) -> None:
    """From the chunks of every row to its last state, its list, and what each chunk keeps for certain."""
    num_rows, vocab_size = logits.shape
    options = launch_options(logits.device)
    states, pivots, measures = workspace.states, workspace.pivots, workspace.measures
    num_chunks, num_spans = workspace.num_chunks, workspace.num_spans
    # Enough programs for the device, and no more that find nothing to do.
    programs = triton.cdiv(_PROGRAMS_PER_SM * device_limits(logits.device).num_sms, num_rows)
    grid = (min(programs, num_spans), num_rows)
    spans_block = triton.next_power_of_2(num_spans)
    search.plan_kernel[(num_rows,)](
        states[0], workspace.num_listed, workspace.chunk_max, workspace.chunk_sum, slots, tables.floats,
        tables.integers, vocab_size, num_chunks, chunks_block=triton.next_power_of_2(num_chunks), num_warps=4,
        **options,
    )  # fmt: skip
    for index in range(_NUM_ROUNDS):
        last = max(index - 1, 0)
        search.narrow_kernel[grid](
            states[index], pivots[index], measures[index], states[last], pivots[last], measures[last],
            workspace.chunk_max, logits, slots, tables.floats, logits.stride(0), vocab_size, num_chunks, num_spans,
            index, spans_block=spans_block, num_warps=_NARROW_WARPS, **options,
        )  # fmt: skip
    search.collect_kernel[grid](
        states[-1], workspace.chunk_kept, workspace.num_listed, workspace.listed_logits, workspace.listed_tokens,
        states[-2], pivots[-1], measures[-1], workspace.chunk_max, logits, slots, tables.floats, logits.stride(0),
        vocab_size, num_chunks, num_spans, _NUM_ROUNDS, spans_block=spans_block, num_warps=_COLLECT_WARPS,
        **options,
    )  # fmt: skip
