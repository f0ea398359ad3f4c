"""The C++ library: these tests need it, so a machine that runs them needs a compiler."""

from collections.abc import Iterator

import pytest
import torch

from tokenmill_kernels.cpu.library import load


@pytest.fixture(autouse=True)
def library_and_same_inputs_every_run() -> Iterator[None]:
    library = load()
    assert library is not None
    torch.manual_seed(0)
    num_threads = library.tokenmill_num_threads()
    yield
    library.tokenmill_set_num_threads(num_threads)
