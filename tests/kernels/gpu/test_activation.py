"""Activation kernels in the interpreter."""

import pytest
import torch

from tests.support.kernel_inputs import assert_near
from tokenmill_kernels import reference
from tokenmill_kernels.gpu.activation import silu_mul


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 1536), (7, 1025), (2, 33)])
def test_silu_mul(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(rows, 2 * width) * 4).to(dtype)
    assert_near(silu_mul(gate_up), reference.silu_mul(gate_up))


def test_extreme_gates() -> None:
    gate_up = torch.tensor([[-80.0, 80.0, 0.0, 2.0, 3.0, 5.0]])
    assert_near(silu_mul(gate_up), reference.silu_mul(gate_up))
