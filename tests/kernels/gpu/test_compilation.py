"""Rehearsals that only compile: nothing is launched, new tensors are zeros, and afterwards all is as before.

In the interpreter there is nothing to compile; `tests/gpu/test_compilation.py` does the same with real kernels.
"""

import logging
from pathlib import Path

import pytest
import torch
import triton

from tokenmill_kernels.gpu import norm
from tokenmill_kernels.gpu.compilation import CompileError, compile_ahead, keep_compiled_kernels

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


def test_errors_are_one_line_and_leave_launching_as_it_was() -> None:
    def fail() -> None:
        raise RuntimeError("at 3:4:\n    x = y\n        ^\nname y is not defined\n")

    with pytest.raises(CompileError, match=r"^RuntimeError: name y is not defined$"):
        compile_ahead([fail], CPU)
    assert norm.rms_norm(torch.ones(2, 64), torch.ones(64), 1e-6).abs().min() > 0


def test_compiled_kernels_are_kept_in_the_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOKENMILL_CACHE_DIR", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        keep_compiled_kernels()
    assert "compiled kernels are not kept" in caplog.text
