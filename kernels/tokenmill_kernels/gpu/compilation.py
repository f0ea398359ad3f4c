"""Compiles kernels in parallel before they are needed, without a list of them: a rehearsal in which every launch only
compiles shows which variants there will be. What is compiled is kept for later starts.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.errors import TritonError
from triton.runtime.jit import KernelInterface

from tokenmill_kernels.cpu.build import BuildError, cache_dir

logger = logging.getLogger(__name__)

_MAX_THREADS = 16


class CompileError(Exception):
    """A kernel cannot be compiled or loaded. The message is one line."""


def keep_compiled_kernels() -> None:
    """Let Triton keep what it compiles in `triton` in the cache directory, unless TRITON_CACHE_DIR names another place.
    Any number of processes may share it: files are complete when they appear, and their names tell what they are of."""
    # Texts of the stages between would be read at every start.
    os.environ.setdefault("TRITON_STORE_BINARY_ONLY", "1")
    if os.environ.get("TRITON_CACHE_DIR"):
        return
    try:
        directory = cache_dir() / "triton"
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(f"{directory} is not writable")
    except (BuildError, OSError) as error:
        logger.warning("compiled kernels are not kept in Tokenmill's cache directory: %s", error)
        return
    os.environ["TRITON_CACHE_DIR"] = str(directory)


def compile_failure(error: Exception) -> CompileError | None:
    """What a launch raised, if that is because its kernel cannot be compiled or does not fit the device."""
    # Passes over the intermediate code have no error of their own.
    of_a_pass = type(error) is RuntimeError and "PassManager" in str(error)
    return CompileError(_one_line(error)) if isinstance(error, TritonError) or of_a_pass else None


def allow_to_fail(kernel: KernelInterface, give_up: Callable[[CompileError], None]) -> None:
    """There is another kernel for what `kernel` does: where `kernel` does not compile, `compile_ahead` calls `give_up`,
    after which the other one must be launched."""
    _REPLACEABLE[id(kernel)] = give_up


def compile_ahead(calls: Iterable[Callable[[], object]], device: torch.device) -> int:
    """Compile and load on `device` every kernel that `calls` launch; returns how many there are.

    Each call is made once, and all once more after a kernel was given up (`allow_to_fail`). Launches return at once and
    compute nothing, while threads compile. Operators of torch run as ever, on new tensors that are zeros instead of
    undefined: as indices they are in range. No other thread may launch kernels of Triton meanwhile. What the calls
    raise themselves passes.

    Raises:
        CompileError: a kernel does not compile, or does not fit the device.
    """
    calls, given_up = list(calls), set[int]()
    while True:
        launched = _rehearse(calls, device)
        failures = [(id(launch.kernel), failure) for launch in launched if (failure := launch.failure()) is not None]
        if not failures:
            return len({id(launch.compiled()) for launch in launched})
        for kernel, failure in failures:
            if kernel in given_up or kernel not in _REPLACEABLE:
                raise failure
        for kernel, failure in failures:
            _REPLACEABLE[kernel](failure)
            given_up.add(kernel)


_REPLACEABLE: dict[int, Callable[[CompileError], None]] = {}
"""By the identity of kernels, which live as long as the process."""


@dataclass(frozen=True, slots=True)
class _Launch:
    """One that was only compiled."""

    kernel: KernelInterface
    result: Any
    """The compiled kernel, or a `triton.FutureKernel` for it."""
    future: "Future[Any] | None"
    """Of the compilation, if this rehearsal began it."""

    def failure(self) -> CompileError | None:
        """Why it could not be compiled; to be asked when all threads are done."""
        error = self.future.exception() if self.future is not None else None
        assert error is None or isinstance(error, CompileError)
        return error

    def compiled(self) -> Any:
        return self.result.result() if isinstance(self.result, triton.FutureKernel) else self.result


def _rehearse(calls: Iterable[Callable[[], object]], device: torch.device) -> list[_Launch]:
    """Makes the calls and waits for what they need compiled; kernels that fail say so in the result."""
    found: dict[int, _Launch] = {}
    with (
        _pool(device) as pool,
        triton.AsyncCompileMode(_Loader(pool), ignore_errors=True),
        _compiling_only(found),
        _ZeroedTensors(),
    ):
        for call in calls:
            try:
                call()
            except (TritonError, RuntimeError) as error:
                failure = compile_failure(error)
                if failure is None:
                    raise
                raise failure from error
    return list(found.values())


class _Loader:
    """An executor that loads what it compiles. Its errors are CompileErrors: nothing else happens there."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool

    def submit(self, compile_kernel: Callable[[], Any]) -> "Future[Any]":
        return self._pool.submit(self._load, compile_kernel)

    @staticmethod
    def _load(compile_kernel: Callable[[], Any]) -> Any:
        try:
            kernel = compile_kernel()
            # The first look at it loads the machine code and makes the function that launches it.
            _ = kernel.run
        except Exception as error:
            raise CompileError(_one_line(error)) from error
        return kernel


def _pool(device: torch.device) -> ThreadPoolExecutor:
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    if device.index is None:
        return ThreadPoolExecutor(threads, "compile")
    return ThreadPoolExecutor(threads, "compile", initializer=torch.cuda.set_device, initargs=(device,))


@contextmanager
def _compiling_only(found: dict[int, _Launch]) -> Iterator[None]:
    """`kernel[grid](...)` compiles what it needs and launches nothing. What it would launch goes to `found` by its
    identity; in the interpreter that is nothing."""
    launching = KernelInterface.__getitem__

    def without_launch(self, grid):
        def compile_only(*args, **kwargs):
            result = self.run(*args, grid=grid, warmup=True, **kwargs)
            if result is None:
                return
            future = result.future if isinstance(result, triton.FutureKernel) else None
            found.setdefault(id(result), _Launch(self, result, future))
            if future is not None and future.done() and future.exception() is None:
                result.result()  # so that the next launch finds it at once

        return compile_only

    KernelInterface.__getitem__ = without_launch
    try:
        yield
    finally:
        KernelInterface.__getitem__ = launching


_ZEROED = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    torch.Tensor.new_empty: torch.Tensor.new_zeros,
}


class _ZeroedTensors(TorchFunctionMode):
    """What is called empty is zero."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return _ZEROED.get(func, func)(*args, **(kwargs or {}))


def _one_line(error: Exception) -> str:
    """Of a message that may show source code, the last line, which says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
