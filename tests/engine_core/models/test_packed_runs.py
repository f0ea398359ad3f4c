"""Attention within runs of rows against a mask over all of them."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

from tokenmill_engine.models.vision.packed import PackedRuns
from tokenmill_kernels.cpu import library

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def threads_as_in_a_worker() -> Iterator[None]:
    of_torch, of_library = torch.get_num_threads(), library.num_threads()
    torch.set_num_threads(1)
    library.set_num_threads(3)
    yield
    torch.set_num_threads(of_torch)
    library.set_num_threads(of_library)


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    run = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    q, k, v = (heads.transpose(0, 1) for heads in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, run[:, None] == run[None, :]).transpose(0, 1).flatten(1)


@pytest.mark.parametrize(
    "lengths",
    [[1], [5, 5, 5], [4, 1, 7, 4, 1, 4], [16] * 9 + [8] * 3 + [2], [700], [90] * 12, [600, 3, 600]],
    ids=["one-row", "equal", "mixed", "windows", "split-by-heads", "split-by-runs", "split-among-others"],
)
@pytest.mark.parametrize("num_heads", [1, 5])
def test_rows_see_their_own_run(lengths: list[int], num_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(sum(lengths), 3, num_heads, 20, generator=generator)
    q, k, v = qkv.unbind(1)
    with torch.inference_mode():
        attended = PackedRuns(lengths, CPU).attend(q, k, v)
    torch.testing.assert_close(attended, masked(q, k, v, lengths), atol=1e-5, rtol=1e-5)


def test_no_runs_have_no_rows() -> None:
    nothing = torch.zeros(0, 4, 8)
    assert PackedRuns([], CPU).attend(nothing, nothing, nothing).shape == (0, 32)


@pytest.mark.slow
def test_a_cpu_needs_no_compiler_of_torch() -> None:
    program = """
import sys, torch
from tokenmill_engine.models.vision.packed import PackedRuns
for dtype in (torch.float32, torch.bfloat16):
    rows = torch.ones(9, 2, 16, dtype=dtype)
    PackedRuns([4, 5], torch.device("cpu"), dtype).attend(rows, rows, rows)
print([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
