"""Products with weight matrices by the vendor's library."""

import torch
from torch.nn import functional as F

from tokenmill_kernels.gpu.activation import silu_mul
from tokenmill_kernels.gpu.argmax import argmax


def library_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x [T, K] @ weight [N, K].T + bias [N] -> [T, N] in `out_dtype`, or in x's dtype if that is None."""
    if out_dtype is None or out_dtype == x.dtype:
        return F.linear(x, weight, bias)
    product = torch.mm(x, weight.t(), out_dtype=out_dtype)
    return product if bias is None else product.add_(bias)


def library_gated_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """silu(gate) * up of gate | up = x [T, K] @ weight [2I, K].T + bias [2I] -> [T, I]; both are rounded before."""
    product: torch.Tensor = silu_mul(F.linear(x, weight, bias))
    return product


def library_argmax(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Index of the largest entry of each row of x [T, K] @ weight [N, K].T in float32 -> int32 [T], as `argmax`."""
    indices: torch.Tensor = argmax(library_linear(x, weight, None, torch.float32))
    return indices
