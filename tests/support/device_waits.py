"""Code that must not wait for the CUDA device."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
