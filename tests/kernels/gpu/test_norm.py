"""RMS norm kernels in the interpreter."""

import pytest
import torch

from tests.support.kernel_inputs import assert_near, poisoned
from tokenmill_kernels import reference
from tokenmill_kernels.gpu.norm import add_rms_norm, embed_rms_norm, rms_norm

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


def test_the_norm_goes_where_it_is_asked_to() -> None:
    x, residual, weight = torch.randn(5, 72), torch.randn(5, 72), torch.randn(72)
    expected, _ = reference.add_rms_norm(x, residual, weight, 1e-5)
    out = poisoned(7, 90, like=x)
    assert add_rms_norm(x, residual, weight, 1e-5, out[:5, :72])[0].data_ptr() == out.data_ptr()
    assert_near(out[:5, :72], expected)
    assert out[5:].isnan().all()
    assert out[:, 72:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 200])
def test_embed_rms_norm(width: int, dtype: torch.dtype) -> None:
    table, weight = torch.randn(50, width).to(dtype), torch.randn(width).to(dtype)
    ids = torch.tensor([3, 49, 0, 3], dtype=torch.int32)
    normed, rows = embed_rms_norm(ids, table, weight, 1e-5)
    assert torch.equal(rows, table[ids])
    assert_near(normed, reference.rms_norm(table[ids], weight, 1e-5))


def test_rows_may_be_strided() -> None:
    wide, weight = torch.randn(4, 100), torch.randn(40)
    assert_near(rms_norm(wide[:, :40], weight, 1e-5), reference.rms_norm(wide[:, :40], weight, 1e-5))


def test_no_rows() -> None:
    assert rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5).shape == (0, 8)
