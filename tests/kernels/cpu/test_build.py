"""The library is compiled once per machine, by whoever comes first, and its absence costs speed and nothing else."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill_kernels.cpu import build

TIMEOUT_S = 800

USE_KERNELS = """
import logging, torch
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
from tests.support.kernel_inputs import PagedShape, assert_near, paged_batch
from tokenmill_kernels import ops, reference
from tokenmill_kernels.cpu.decoder import DecoderShape, DenseDecoder

torch.manual_seed(0)
x, weight = torch.randn(7, 64).bfloat16(), torch.randn(17, 64).bfloat16()
plain = ops.pack_linear(weight)
assert plain is weight
assert_near(ops.linear(x, plain), reference.linear(x, weight))
assert torch.equal(ops.linear_argmax(x, plain).long(), reference.linear_argmax(x, weight))
assert torch.equal(ops.rms_norm(x, x[0], 1e-5), reference.rms_norm(x, x[0], 1e-5))
batch = paged_batch(PagedShape(4, 2, 64), [(1, 40), (9, 30)])
arguments = (batch.q, batch.k_cache, batch.v_cache)
attended = ops.paged_attention(*arguments, **batch.lengths, scale=0.1)
assert_near(attended, reference.paged_attention(*arguments, **batch.lengths, scale=0.1))
assert not DenseDecoder.supports(DecoderShape(1, 64, 64, 4, 2, 16, 1e-5, 0.25), torch.bfloat16)
"""


def environment(cache: Path, **changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "CXX"}
    return kept | {"TOKENMILL_CACHE_DIR": str(cache)} | changes


def executable(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def run_python(code: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def start_build(env: dict[str, str]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tokenmill_kernels.cpu.build"]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def warnings_in(log: str) -> list[str]:
    return [line for line in log.splitlines() if line.startswith("WARNING")]


def test_the_sources_ship_with_the_package() -> None:
    assert {"api.cpp", "api.h", "vec.hpp"} <= {path.name for path in build.SOURCE_DIR.iterdir()}


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE_DIR", str(tmp_path))
    assert build.cache_dir() == tmp_path
    monkeypatch.delenv("TOKENMILL_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert build.cache_dir() == Path("/somewhere/tokenmill")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert build.cache_dir() == Path("/home/somebody/.cache/tokenmill")


@pytest.mark.slow
def test_without_a_compiler_torch_does_the_work_and_says_so_once(tmp_path: Path) -> None:
    result = run_python(USE_KERNELS, environment(tmp_path, PATH=str(tmp_path)))
    assert result.returncode == 0, result.stderr
    assert len(warnings_in(result.stderr)) == 1
    assert "no C++ compiler found" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    compiler = executable(tmp_path / "c++", 'test "$1" = --version || { echo "x.cpp:1: error: too old" >&2; exit 1; }')
    result = run_python(USE_KERNELS, environment(tmp_path / "cache", CXX=compiler))
    assert result.returncode == 0, result.stderr
    warnings = warnings_in(result.stderr)
    assert len(warnings) == 1
    assert f"{compiler} refused the CPU kernels: x.cpp:1: error: too old" in warnings[0]
    assert not list((tmp_path / "cache").glob("*.so"))


def test_the_command_fails_in_one_line(tmp_path: Path) -> None:
    process = start_build(environment(tmp_path, PATH=str(tmp_path)))
    output, log = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert output == ""
    assert log.splitlines() == ["The CPU kernels were not built: no C++ compiler found (tried $CXX, g++, c++, clang++)"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    process = start_build(environment(occupied))
    _, log = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert f"cannot write to the cache directory {occupied}" in log


@pytest.mark.slow
def test_processes_that_start_together_build_once(tmp_path: Path) -> None:
    """Afterwards the library is found without any compiler, and a new version of the compiler builds anew."""
    real = build.find_compiler()
    assert real is not None
    calls = tmp_path / "calls"
    compiler = executable(tmp_path / "c++", f'echo "$@" >> {calls}; exec {real} "$@"')
    cache = tmp_path / "cache"
    processes = [start_build(environment(cache, CXX=compiler)) for _ in range(4)]
    answers = {process.communicate(timeout=TIMEOUT_S)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0] * 4
    (library,) = answers
    assert list(cache.glob("*.so")) == [Path(library)]
    assert not list(cache.glob("build-*"))
    assert sum("-shared" in line for line in calls.read_text().splitlines()) == 1

    process = start_build(environment(cache, PATH=str(tmp_path / "empty")))
    assert process.communicate(timeout=TIMEOUT_S)[0].strip() == library

    other = executable(tmp_path / "new", f'test "$1" = --version && echo new || exit 1; echo "$@" >> {calls}')
    process = start_build(environment(cache, CXX=other))
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
