"""Gather kernels in the interpreter."""

import pytest
import torch

from tokenmill_kernels import reference
from tokenmill_kernels.gpu.gather import gather_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("first_width", "second_width"), [(8, 8), (24, 3000), (2049, 5)])
def test_gather_rows(first_width: int, second_width: int, dtype: torch.dtype) -> None:
    first, second = torch.randn(20, first_width).to(dtype), torch.randn(20, second_width).to(dtype)
    rows = torch.tensor([19, 0, -1, 7, 7], dtype=torch.int32)
    first[10], second[11] = float("nan"), float("nan")
    for actual, expected in zip(
        gather_rows(first, second, rows), reference.gather_rows(first, second, rows), strict=True
    ):
        assert torch.equal(actual, expected)
        assert not actual[2].any()
        assert not actual.isnan().any()


def test_rows_may_be_strided() -> None:
    wide = torch.randn(6, 40)
    rows = torch.tensor([5, 2], dtype=torch.int32)
    first, second = gather_rows(wide[:, :10], wide[:, 10:30], rows)
    assert torch.equal(first, wide[rows, :10])
    assert torch.equal(second, wide[rows, 10:30])
