"""Rehearsals that only compile: nothing is launched, new tensors are zeros, and afterwards all is as before.

In the interpreter there is nothing to compile; `tests/gpu/test_compilation.py` does the same with real kernels.
"""

import logging
from collections.abc import Callable
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.runtime._async_compile import active_mode
from triton.runtime.errors import InterpreterError, OutOfResources
from triton.runtime.jit import KernelInterface

from tokenmill_kernels.gpu import norm
from tokenmill_kernels.gpu.compilation import CompileError, allow_to_fail, compile_ahead, keep_compiled_kernels

CPU = torch.device("cpu")


def test_launches_compute_nothing_and_do_so_again_afterwards() -> None:
    x, weight = torch.randn(3, 64), torch.randn(64)
    seen: list[torch.Tensor] = []
    assert compile_ahead([lambda: seen.append(norm.rms_norm(x, weight, 1e-6))], CPU) == 0
    assert torch.equal(seen[0], torch.zeros(3, 64))
    assert norm.rms_norm(x, weight, 1e-6).abs().min() > 0


def test_every_kind_of_empty_tensor_is_zero_so_that_it_may_be_an_index() -> None:
    table = torch.arange(10)
    seen: list[torch.Tensor] = []

    def look_up() -> None:
        indices = (torch.empty(100, dtype=torch.int64), torch.empty_like(table), table.new_empty(50))
        seen.extend(table[index] for index in indices)

    compile_ahead([look_up], CPU)
    assert [len(values) for values in seen] == [100, 10, 50]
    assert all(not values.any() for values in seen)


class Kernel(KernelInterface):  # type: ignore[misc]
    """Compiled in a thread, as those of Triton are, but from nothing; its variants by number."""

    def __init__(self, failures: dict[int, Exception]) -> None:
        self.failures = failures
        self.compiled: list[int] = []

    def run(self, variant: int, *, grid: tuple[int, ...], warmup: bool) -> Any:
        assert warmup
        submit = active_mode.get().submit

        def compile_variant() -> Any:
            self.compiled.append(variant)
            if variant in self.failures:
                raise self.failures[variant]
            return SimpleNamespace(run=print)

        # What is to be done with the result: nothing, however many such functions the release asks for.
        return submit((id(self), variant), compile_variant, *[lambda _: None] * (len(signature(submit).parameters) - 2))


LONG_ERROR = RuntimeError("at 3:4:\n    x = y\n        ^\nname y is not defined\n")


def test_errors_are_one_line_and_leave_launching_as_it_was() -> None:
    kernel = Kernel({2: LONG_ERROR})
    with pytest.raises(CompileError, match=r"^RuntimeError: name y is not defined$"):
        compile_ahead([launching(kernel, variant) for variant in (1, 2, 2, 3)], CPU)
    assert sorted(kernel.compiled) == [1, 2, 3]
    assert compile_ahead([launching(Kernel({}), 1)], CPU) == 1
    assert norm.rms_norm(torch.ones(2, 64), torch.ones(64), 1e-6).abs().min() > 0


@pytest.mark.parametrize(
    "error", [OutOfResources(3, 2, "shared memory"), RuntimeError("PassManager::run failed"), InterpreterError("no")]
)
def test_what_triton_raises_at_a_launch_is_a_kernel_that_cannot_be_compiled(error: Exception) -> None:
    with pytest.raises(CompileError, match=type(error).__name__):
        compile_ahead([raising(error)], CPU)


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes"), ValueError("a bug"), KeyError(1), torch.OutOfMemoryError("PassManager")]
)
def test_what_goes_wrong_beside_kernels_is_not_taken_for_one(error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        compile_ahead([raising(error)], CPU)
    assert raised.value is error
    assert compile_ahead([launching(Kernel({}), 1)], CPU) == 1


def launching(kernel: Kernel, variant: int) -> Callable[[], None]:
    def call() -> None:
        kernel[(1,)](variant)

    return call


def raising(error: Exception) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


def test_a_kernel_that_may_fail_is_replaced() -> None:
    quick, safe, reasons = Kernel({2: LONG_ERROR}), Kernel({}), list[str]()
    allow_to_fail(quick, lambda reason: reasons.append(str(reason)))

    def launch(variant: int) -> None:
        (safe if reasons else quick)[(1,)](variant)

    calls = [partial(launch, variant) for variant in (1, 2, 3)]
    assert compile_ahead(calls, CPU) == 3
    assert reasons == ["RuntimeError: name y is not defined"]
    assert sorted(safe.compiled) == [1, 2, 3]
    assert compile_ahead(calls, CPU) == 3
    assert len(reasons) == 1


def test_a_kernel_that_is_launched_although_it_was_given_up() -> None:
    kernel, reasons = Kernel({1: LONG_ERROR}), list[Exception]()
    allow_to_fail(kernel, reasons.append)
    with pytest.raises(CompileError, match="name y is not defined"):
        compile_ahead([launching(kernel, 1)], CPU)
    assert len(reasons) == 1


def test_compiled_kernels_are_kept_in_the_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_STORE_BINARY_ONLY", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.setenv("TOKENMILL_CACHE_DIR", str(tmp_path))
    keep_compiled_kernels()
    assert triton.knobs.cache.dir == str(tmp_path / "triton")
    assert (tmp_path / "triton").is_dir()
    monkeypatch.setenv("TRITON_CACHE_DIR", "/chosen")
    keep_compiled_kernels()
    assert triton.knobs.cache.dir == "/chosen"


def test_a_cache_directory_that_cannot_be_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRITON_STORE_BINARY_ONLY", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOKENMILL_CACHE_DIR", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        keep_compiled_kernels()
    assert "compiled kernels are not kept" in caplog.text
