"""Runs written into a buffer, in the interpreter."""

import pytest
import torch

from tokenmill_kernels.gpu.scatter import scatter_runs


@pytest.mark.parametrize("lengths", [[1], [1, 1, 3], [700, 1, 0, 5], [20_000, 7]])
def test_runs_land_where_they_belong(lengths: list[int]) -> None:
    buffer = torch.full((60_000,), -1, dtype=torch.int32)
    values = torch.randint(0, 1000, (sum(lengths) + 3,), dtype=torch.int32)
    offsets = [50_000, 3, 40_000, 41_000][: len(lengths)] if max(lengths) < 1000 else [9, 40_000]
    firsts = [3 + sum(lengths[:run]) for run in range(len(lengths))]
    scatter_runs(buffer, torch.tensor(list(zip(offsets, firsts, lengths, strict=True))), values, max(lengths))
    expected = torch.full_like(buffer, -1)
    for offset, first, length in zip(offsets, firsts, lengths, strict=True):
        expected[offset : offset + length] = values[first : first + length]
    assert torch.equal(buffer, expected)
