"""Code that must not wait for the CUDA device."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


@contextmanager
def refuse_synchronization() -> Iterator[None]:
    """Whatever waits for the device inside raises RuntimeError."""
    with warnings.catch_warnings():
        # It says that it does not detect everything yet.
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def capture(call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of `call`, which must not wait, after a run that compiles its kernels."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), refuse_synchronization():
        result = call()
    return graph, result
