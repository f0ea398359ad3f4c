"""Root-mean-square normalisation (arXiv:1910.07467)."""

from collections.abc import Iterator

import torch

from tokenmill_engine.layers.linear import Placement
from tokenmill_kernels import ops


class RMSNorm:
    """x / rms(x) * weight over the last dimension, with the residual addition fused in front of it."""

    __slots__ = ("eps", "weight")

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        self.weight = placement.empty(size)
        self.eps = eps

    def targets(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, view to fill)."""
        yield f"{name}.weight", self.weight

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual), both [num_tokens, size]; without a residual, (norm(x), x).
        `residual` may be overwritten."""
        if residual is None:
            return ops.rms_norm(x, self.weight, self.eps), x
        return ops.add_rms_norm(x, residual, self.weight, self.eps)
