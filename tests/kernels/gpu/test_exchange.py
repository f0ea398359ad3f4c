"""Entries of the rings between host and device, in the interpreter."""

import numpy as np
import pytest
import torch

from tokenmill_kernels.gpu import exchange
from tokenmill_kernels.gpu.exchange import EntryShape, receive

SHAPE = EntryShape(num_rows=300, max_words=270, max_runs=20, max_values=3000)
NUM_ENTRIES = 3


def ring() -> torch.Tensor:
    return torch.full((NUM_ENTRIES, SHAPE.size), 77_777, dtype=torch.int32)


def sent() -> torch.Tensor:
    return torch.full((4 * SHAPE.num_rows + 1,), -7, dtype=torch.int32)


@pytest.mark.parametrize("num_requests", [0, 1, 299, 300])
def test_rows_of_decodes_follow_from_their_slots(num_requests: int) -> None:
    entries, turn = ring(), torch.tensor([4, 0])
    entry, out = entries[4 % NUM_ENTRIES], sent()
    slots = torch.randperm(1000)[:num_requests].to(torch.int32)
    entry[: exchange.NUM_HEADERS] = 0
    entry[[exchange.NUM_REQUESTS, exchange.NUM_SAMPLES, exchange.NUM_TOKENS]] = num_requests
    entry[exchange.ONLY_DECODES] = 1
    first = exchange.NUM_HEADERS + SHAPE.num_rows
    entry[first : first + num_requests] = slots
    receive(out, torch.zeros(9, dtype=torch.int32), turn, entries, SHAPE)
    padding = SHAPE.num_rows - num_requests
    starts, rows = out[: SHAPE.num_rows + 1], out[SHAPE.num_rows + 1 :].view(3, -1)
    assert starts.tolist() == [*range(num_requests + 1), *[num_requests] * padding]
    assert rows[0].tolist() == slots.tolist() + [0] * padding
    assert rows[1].tolist() == slots.tolist() + [-1] * padding
    assert turn.tolist() == [5, 0]


def test_rows_of_chunks() -> None:
    entries, turn = ring(), torch.tensor([0, 0])
    entry, out = entries[0], sent()
    entry[: exchange.NUM_HEADERS] = torch.tensor([3, 2, 40, 0, 0, 0, 0, 0])
    rows = entry[exchange.NUM_HEADERS : SHAPE.words_start].view(4, -1)
    rows[0, :3], rows[1, :3] = torch.tensor([1, 11, 40]), torch.tensor([9, 4, 5])
    rows[2, :2], rows[3, :2] = torch.tensor([9, 5]), torch.tensor([0, 39])
    receive(out, torch.zeros(9, dtype=torch.int32), turn, entries, SHAPE)
    padding = SHAPE.num_rows - 3
    starts, received = out[: SHAPE.num_rows + 1], out[SHAPE.num_rows + 1 :].view(3, -1)
    assert starts.tolist() == [0, 1, 11, 40, *[40] * padding]
    assert received[0].tolist() == [9, 4, 5, *[0] * padding]
    assert received[1].tolist() == [9, 5, *[-1] * (padding + 1)]
    assert received[2].tolist() == [0, 39, *[-1] * (padding + 1)]


@pytest.mark.parametrize("num_words", [0, 1, 270])
@pytest.mark.parametrize("lengths", [[], [1], [1500, 1, 0, 70], [3] * 20])
def test_changes_reach_the_tables(num_words: int, lengths: list[int]) -> None:
    entries, turn = ring(), torch.tensor([1, 0])
    entry = entries[1]
    tables = torch.full((50_000,), -1, dtype=torch.int32)
    entry[: exchange.NUM_HEADERS] = torch.tensor([0, 0, 0, 1, num_words, len(lengths), 0, 0])
    offsets = torch.randperm(9000)[:num_words].to(torch.int32)
    words = entry[SHAPE.words_start : SHAPE.runs_start].view(2, -1)
    words[0, :num_words], words[1, :num_words] = offsets, torch.arange(num_words, dtype=torch.int32)
    values = entry[SHAPE.values_start :]
    values[: sum(lengths)] = torch.randint(0, 1000, (sum(lengths),), dtype=torch.int32)
    firsts = np.cumsum([0, *lengths])[:-1]
    expected = tables.clone()
    expected[offsets.long()] = torch.arange(num_words, dtype=torch.int32)
    runs = entry[SHAPE.runs_start : SHAPE.values_start].view(-1, 3)
    for run, (length, first) in enumerate(zip(lengths, firsts, strict=True)):
        runs[run] = torch.tensor([10_000 + 2000 * run, first, length])
        expected[10_000 + 2000 * run : 10_000 + 2000 * run + length] = values[first : first + length]
    receive(sent(), tables, turn, entries, SHAPE)
    assert torch.equal(tables, expected)
