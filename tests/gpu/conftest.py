"""Tests that need a GPU are skipped where there is none. One that does not work fails them."""

import glob
from collections.abc import Iterator

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of all folders."""
    if glob.glob("/dev/nvidia*"):
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture
def exact_float32() -> Iterator[None]:
    """Float32 products in full precision, so that they can be compared."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
