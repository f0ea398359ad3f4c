"""The Triton kernels run in Triton's interpreter here, on CPU tensors; `tests/gpu` runs them compiled."""

import pytest
import torch
import triton


@pytest.fixture(autouse=True)
def interpreted() -> None:
    """`tests/conftest.py` chose the interpreter before anything imported triton, and inputs are the same every run."""
    assert triton.knobs.runtime.interpret
    torch.manual_seed(0)
