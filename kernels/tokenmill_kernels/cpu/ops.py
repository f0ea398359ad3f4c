"""The kernels for CPU tensors, with the signatures of `tokenmill_kernels.ops`."""

import torch
from torch.nn import functional as F

from tokenmill_kernels.cpu.packed import PackedWeight
from tokenmill_kernels.reference import add_rms_norm, paged_attention, rms_norm, rotary_kv_write, silu_mul

__all__ = [
    "add_rms_norm",
    "linear",
    "linear_argmax",
    "pack_linear",
    "paged_attention",
    "rms_norm",
    "rotary_kv_write",
    "silu_mul",
]


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [T, K] @ weight [N, K].T + bias."""
    if isinstance(weight, PackedWeight):
        raise TypeError("packed by a library that is not there")
    product = F.linear(x, weight, bias)
    return product if out_dtype is None else product.to(out_dtype)


def linear_argmax(x: torch.Tensor, weight: torch.Tensor | PackedWeight) -> torch.Tensor:
    """Argmax of each row of the product, -1 for a row with a NaN."""
    logits = linear(x, weight, out_dtype=torch.float32)
    best = logits.argmax(dim=-1)
    return torch.where(logits.isnan().any(dim=-1), torch.full_like(best, -1), best)


def pack_linear(weight: torch.Tensor) -> torch.Tensor | PackedWeight:
    """The matrix itself."""
    return weight
