"""What host and device hand each other in a step, through rings of entries in pinned host memory.

The device counts the steps itself, so one CUDA graph finds another entry each time it is replayed, and no copy has to
be enqueued before it or after it. Host and device agree as long as every step runs `receive` once.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tokenmill_kernels.gpu.launch import launch_options, let_dependents_start, wait_for_inputs

NUM_HEADERS = 8
"""Words at the start of an entry: the counts below, and whether every request has one token and samples."""
NUM_REQUESTS, NUM_SAMPLES, NUM_TOKENS, ONLY_DECODES, NUM_WORDS, NUM_RUNS = range(6)

TURN_MASK = 0x7FFFFFFF
"""The bits of the number of a step that a report has."""

_BLOCK = 256
_RUN_BLOCK = 1024
_RUN_PROGRAMS = 16
_NUM_HEADERS, _RUN_WIDTH, _TURN_MASK = tl.constexpr(NUM_HEADERS), tl.constexpr(3), tl.constexpr(TURN_MASK)


@dataclass(frozen=True, slots=True)
class EntryShape:
    """Places in an entry, all int32: headers, [4, num_rows] rows, [2, max_words] words, [max_runs, 3] runs, values.

    The rows are: last tokens + 1 of the requests, their slots; the slots that sample, and the tokens that decide.
    If all requests decode only their slots are read. Words are single writes into the tables, offset and value; runs
    are (offset, first value, length).
    """

    num_rows: int
    max_words: int
    max_runs: int
    max_values: int

    @property
    def words_start(self) -> int:
        return NUM_HEADERS + 4 * self.num_rows

    @property
    def runs_start(self) -> int:
        return self.words_start + 2 * self.max_words

    @property
    def values_start(self) -> int:
        return self.runs_start + 3 * self.max_runs

    @property
    def size(self) -> int:
        """int32 words of an entry."""
        return self.values_start + self.max_values


@triton.jit
def _receive_rows(sent_ptr, entry_ptr, num_rows, lanes):
    """Rows `lanes` of the step, padded: no tokens, slot 0, no slot that samples, no token that decides."""
    num_requests, num_samples = tl.load(entry_ptr), tl.load(entry_ptr + 1)
    num_tokens, only_decodes = tl.load(entry_ptr + 2), tl.load(entry_ptr + 3)
    rows_ptr = entry_ptr + _NUM_HEADERS
    slots = tl.load(rows_ptr + num_rows + lanes, mask=lanes < num_requests, other=0)
    # Of decodes nothing else needs to be read.
    read = lanes < tl.where(only_decodes != 0, 0, num_requests)
    read_samples = lanes < tl.where(only_decodes != 0, 0, num_samples)
    ends = tl.load(rows_ptr + lanes, mask=read, other=0)
    sample_slots = tl.load(rows_ptr + 2 * num_rows + lanes, mask=read_samples, other=-1)
    deciding = tl.load(rows_ptr + 3 * num_rows + lanes, mask=read_samples, other=-1)
    implied = lanes < tl.where(only_decodes != 0, num_requests, 0)
    ends = tl.where(read, ends, tl.where(implied, lanes + 1, num_tokens))
    sample_slots = tl.where(implied, slots, sample_slots)
    stored = lanes < num_rows
    tl.store(sent_ptr + lanes, tl.zeros_like(lanes), mask=lanes == 0)
    tl.store(sent_ptr + 1 + lanes, ends, mask=stored)
    tl.store(sent_ptr + 1 + num_rows + lanes, slots, mask=stored)
    tl.store(sent_ptr + 1 + 2 * num_rows + lanes, sample_slots, mask=stored)
    tl.store(sent_ptr + 1 + 3 * num_rows + lanes, deciding, mask=stored)


@triton.jit
def _receive_run(tables_ptr, run_ptr, values_ptr, block: tl.constexpr):
    offset, first, length = tl.load(run_ptr), tl.load(run_ptr + 1), tl.load(run_ptr + 2)
    for done in range(0, length, block):
        columns = done + tl.arange(0, block)
        values = tl.load(values_ptr + first + columns, mask=columns < length, other=0)
        tl.store(tables_ptr + offset + columns, values, mask=columns < length)


@triton.jit
def _receive_kernel(
    sent_ptr, tables_ptr, turn_ptr, ring_ptr, entry_size, num_rows, max_words, max_runs, row_programs, word_programs,
    num_entries: tl.constexpr, run_programs: tl.constexpr, block: tl.constexpr, run_block: tl.constexpr,
    pdl: tl.constexpr,
):  # fmt: skip
    """Programs for rows, then for words, then for runs. The one that is done last counts the step."""
    wait_for_inputs(pdl)
    let_dependents_start(pdl)
    program = tl.program_id(0)
    turn = tl.load(turn_ptr)
    entry_ptr = ring_ptr + (turn % num_entries) * entry_size
    words_ptr = entry_ptr + _NUM_HEADERS + 4 * num_rows
    runs_ptr = words_ptr + 2 * max_words
    if program < row_programs:
        _receive_rows(sent_ptr, entry_ptr, num_rows, program * block + tl.arange(0, block))
    elif program < row_programs + word_programs:
        lanes = (program - row_programs) * block + tl.arange(0, block)
        inside = lanes < tl.load(entry_ptr + 4)
        offsets = tl.load(words_ptr + lanes, mask=inside, other=0)
        tl.store(tables_ptr + offsets, tl.load(words_ptr + max_words + lanes, mask=inside, other=0), mask=inside)
    else:
        num_runs = tl.load(entry_ptr + 5)
        for run in range(program - row_programs - word_programs, num_runs, run_programs):
            _receive_run(tables_ptr, runs_ptr + _RUN_WIDTH * run, runs_ptr + _RUN_WIDTH * max_runs, run_block)
    # Every thread of every program has read the turn before it changes.
    tl.debug_barrier()
    if tl.atomic_add(turn_ptr + 1, 1) == tl.num_programs(0) - 1:
        tl.store(turn_ptr + 1, 0)
        tl.store(turn_ptr, turn + 1)


def receive(
    sent: torch.Tensor, tables: torch.Tensor, turn: torch.Tensor, ring: torch.Tensor, shape: EntryShape
) -> None:
    """Takes in the next entry of `ring`: the step's rows, and what changes in the tables.

    Args:
        sent: int32 [4 * num_rows + 1]: prefix sum of the new tokens [num_rows + 1], then slots, slots that sample and
            deciding tokens, [num_rows] each, padded.
        tables: int32, contiguous; the writes of an entry do not overlap.
        turn: int64 [2]: steps received so far, and 0.
        ring: int32 [num_entries, shape.size], pinned memory if `sent` is on a GPU.
    """
    row_programs, word_programs = triton.cdiv(shape.num_rows, _BLOCK), triton.cdiv(shape.max_words, _BLOCK)
    _receive_kernel[(row_programs + word_programs + _RUN_PROGRAMS,)](
        sent, tables, turn, ring, shape.size, shape.num_rows, shape.max_words, shape.max_runs, row_programs,
        word_programs, num_entries=ring.shape[0], run_programs=_RUN_PROGRAMS, block=_BLOCK, run_block=_RUN_BLOCK,
        num_warps=4, **launch_options(sent.device),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Report:
    """Where a step tells the host what came of it."""

    ring: torch.Tensor
    """int32 [num_entries, 1 + S or more]: number of the step, modulo 2^31, and its tokens; pinned memory if the step is
    on a GPU."""
    turn: torch.Tensor
    """As in `receive`."""


@triton.jit
def write_report(ring_ptr, turn_ptr, entry_size, sampled, lanes, num_samples, num_entries: tl.constexpr):
    """Puts tokens `sampled` [block], of which `num_samples` count, at places `lanes` of the entry of the step that was
    received last."""
    turn = tl.load(turn_ptr)
    entry_ptr = ring_ptr + ((turn + num_entries - 1) % num_entries) * entry_size
    number = tl.zeros_like(lanes) + (turn & _TURN_MASK).to(tl.int32)
    tl.store(entry_ptr + lanes, number, mask=lanes == 0)
    tl.store(entry_ptr + 1 + lanes, sampled, mask=lanes < num_samples)
