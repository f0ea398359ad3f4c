"""Root-mean-square normalisation (arXiv:1910.07467)."""

from collections.abc import Iterator

import torch

from tokenmill_engine.layers.embedding import TokenEmbedding
from tokenmill_engine.layers.placement import Placement, Target
from tokenmill_kernels import ops


class RMSNorm:
    """x / rms(x) * weight over the last dimension, fused with the operation in front of it."""

    __slots__ = ("eps", "weight")

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        self.weight = placement.empty(size)
        self.eps = eps

    def targets(self, name: str) -> Iterator[tuple[str, Target]]:
        """(checkpoint name, place)."""
        yield f"{name}.weight", Target.of_whole(self.weight)

    def embed(self, input_ids: torch.Tensor, table: TokenEmbedding) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(rows), rows) of the embeddings of int32 [num_tokens], both [num_tokens, size]."""
        if not table.is_whole:
            rows = table(input_ids)
            return ops.rms_norm(rows, self.weight, self.eps), rows
        return ops.embed_rms_norm(input_ids, table.weight, self.weight, self.eps)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual), both [num_tokens, size]; the norm in `out` if that is given.
        `residual` may be overwritten."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps, out=out)
