"""From the name of an attention backend to the backend."""

import torch

from tokenmill_engine.attention.backend import AttentionBackend, BuiltInAttention
from tokenmill_engine.attention.flash_attention import FlashAttention4
from tokenmill_engine.errors import StartupError
from tokenmill_kernels.cpu import library


def built_in(device: torch.device, dtype: torch.dtype) -> BuiltInAttention:
    """What needs nothing but this package: on a CPU the C++ library where it can compute with `dtype`, else torch."""
    if device.type == "cuda":
        return BuiltInAttention("triton")
    return BuiltInAttention("native" if library.obstacle(dtype) is None else "torch")


def attention_backend(name: str, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """The backend of that name (a `config.attention.AttentionBackendName`), or with `auto` what is built in.

    Raises:
        StartupError: what is asked for by name cannot serve here: a package is broken, or there is no C++ library.
    """
    if name == "flash-attn-4":
        return FlashAttention4()
    obstacle = library.obstacle(dtype) if name == "native" else None
    if obstacle is not None:
        raise StartupError(
            f"--attention-backend native needs Tokenmill's CPU kernels, which cannot serve here: {obstacle}; with "
            "--attention-backend auto PyTorch operators do their work, several times slower"
        )
    return built_in(device, dtype)
