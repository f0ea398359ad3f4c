"""Compiles kernels in parallel before they are needed, without a list of them: a rehearsal in which every launch only
compiles shows which variants there will be. What is compiled is kept for later starts.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode
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


def compile_ahead(calls: Iterable[Callable[[], object]], device: torch.device) -> int:
    """Compile and load on `device` every kernel that `calls` launch; returns how many there are.

    Each call is made once. Its launches return at once and compute nothing, while threads compile. Operators of torch
    run as ever, on new tensors that are zeros instead of undefined: as indices they are in range. No other thread may
    launch kernels of Triton meanwhile.

    Raises:
        CompileError: one does not compile, or does not fit the device.
    """
    found: dict[int, Any] = {}
    try:
        with _pool(device) as pool, triton.AsyncCompileMode(_Loader(pool)), _compiling_only(found), _ZeroedTensors():
            for call in calls:
                call()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise CompileError(_one_line(error)) from error
    return len({id(_compiled(kernel)) for kernel in found.values() if kernel is not None})


class _Loader:
    """An executor that loads what it compiles."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool

    def submit(self, compile_kernel: Callable[[], Any]) -> "Future[Any]":
        return self._pool.submit(self._load, compile_kernel)

    @staticmethod
    def _load(compile_kernel: Callable[[], Any]) -> Any:
        kernel = compile_kernel()
        # The first look at it loads the machine code and makes the function that launches it.
        _ = kernel.run
        return kernel


def _pool(device: torch.device) -> ThreadPoolExecutor:
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    if device.index is None:
        return ThreadPoolExecutor(threads, "compile")
    return ThreadPoolExecutor(threads, "compile", initializer=torch.cuda.set_device, initargs=(device,))


def _compiled(kernel: Any) -> Any:
    """The kernel that a launch stands for, which may still be compiled then."""
    return kernel.result() if isinstance(kernel, triton.FutureKernel) else kernel


@contextmanager
def _compiling_only(found: dict[int, Any]) -> Iterator[None]:
    """`kernel[grid](...)` compiles what it needs and launches nothing. What it would launch goes to `found` by its
    identity; in the interpreter that is None."""
    launching = KernelInterface.__getitem__

    def without_launch(self, grid):
        def compile_only(*args, **kwargs):
            kernel = self.run(*args, grid=grid, warmup=True, **kwargs)
            found[id(kernel)] = kernel
            if isinstance(kernel, triton.FutureKernel) and kernel.future is not None and kernel.future.done():
                kernel.result()  # so that the next launch finds it at once

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
