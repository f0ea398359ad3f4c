"""From the name of an attention backend to the backend."""

import torch

from tokenmill_engine.attention.backend import AttentionBackend, BuiltInAttention
from tokenmill_engine.attention.flash_attention import FlashAttention4
from tokenmill_kernels.cpu import library


def built_in(device: torch.device) -> BuiltInAttention:
    """What needs nothing but this package."""
    if device.type == "cuda":
        return BuiltInAttention("triton")
    return BuiltInAttention("native" if library.load() is not None else "torch")


def attention_backend(name: str, device: torch.device) -> AttentionBackend:
    """The backend of that name (a `config.attention.AttentionBackendName`, or `auto`).

    Raises:
        StartupError: its package is broken.
    """
    return FlashAttention4() if name == "flash-attn-4" else built_in(device)
