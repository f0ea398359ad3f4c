"""RMS norm kernels in the interpreter."""

import pytest
import torch

from tests.support.kernel_inputs import assert_near
from tokenmill_kernels import reference
from tokenmill_kernels.gpu.norm import add_rms_norm, rms_norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 576), (17, 33), (2, 1000)])
def test_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, width).to(dtype) * 3, torch.randn(width).to(dtype)
    assert_near(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


def test_epsilon_counts() -> None:
    x, weight = torch.full((2, 8), 1e-3), torch.ones(8)
    assert_near(rms_norm(x, weight, 1e-2), reference.rms_norm(x, weight, 1e-2))
    assert rms_norm(x, weight, 1e-2).max() < 0.011


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_replaces_the_residual(dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(5, 72).to(dtype), torch.randn(5, 72).to(dtype), torch.randn(72).to(dtype)
    expected, expected_sum = reference.add_rms_norm(x, residual, weight, 1e-5)
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert_near(normed, expected)
    assert total is residual
    assert_near(total, expected_sum)


def test_rows_may_be_strided() -> None:
    wide, weight = torch.randn(4, 100), torch.randn(40)
    assert_near(rms_norm(wide[:, :40], weight, 1e-5), reference.rms_norm(wide[:, :40], weight, 1e-5))


def test_no_rows() -> None:
    assert rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5).shape == (0, 8)
