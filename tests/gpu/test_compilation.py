"""Kernels compiled ahead on a GPU: all at once, nothing launched, nothing left to compile for the first launch."""

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from tokenmill_kernels.gpu.compilation import CompileError, compile_ahead

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
SIZE = 1024


@pytest.fixture(autouse=True)
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were compiled, also those that the cache directory held."""
    names: list[str] = []

    def listen(*, src: triton.compiler.ASTSource, **_: object) -> None:
        names.append(src.name)

    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    return names


@triton.jit
def _add_kernel(x_ptr, y_ptr, amount: tl.constexpr, size: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.arange(0, size)
    tl.store(y_ptr + index, tl.load(x_ptr + index) + amount)


@triton.jit
def _broken_kernel(x_ptr):  # type: ignore[no-untyped-def]
    tl.store(x_ptr, no_such_name)  # type: ignore[name-defined]  # noqa: F821


def test_every_variant_is_compiled_and_the_results_are_right(compiled: list[str], cache_directory: Path) -> None:
    x = torch.arange(SIZE, dtype=torch.float32, device=CUDA)
    y = torch.full_like(x, -1.0)

    def add(amount: int) -> None:
        _add_kernel[(1,)](x, y, amount, SIZE)

    assert compile_ahead([lambda: add(1), lambda: add(2), lambda: add(2), lambda: add(3)], CUDA) == 3
    torch.cuda.synchronize()
    assert (y == -1).all()
    assert len(compiled) == 3
    for amount in (1, 2, 3):
        add(amount)
        assert torch.equal(y, x + amount)
    assert len(compiled) == 3
    assert len(list(cache_directory.rglob("*.cubin"))) == 3


def test_what_is_compiled_already_is_not_launched_either() -> None:
    x, y = torch.zeros(SIZE, device=CUDA), torch.zeros(SIZE, device=CUDA)
    _add_kernel[(1,)](x, y, 5, SIZE)
    y.zero_()
    assert compile_ahead([lambda: _add_kernel[(1,)](x, y, 5, SIZE)], CUDA) == 1
    assert not y.any()


def test_a_kernel_that_does_not_compile_is_one_readable_line() -> None:
    x = torch.zeros(1, device=CUDA)
    with pytest.raises(CompileError, match="no_such_name") as raised:
        compile_ahead([lambda: _broken_kernel[(1,)](x)], CUDA)
    assert "\n" not in str(raised.value)
