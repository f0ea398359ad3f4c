"""Root-mean-square normalisation (arXiv:1910.07467)."""

from collections.abc import Iterator

import torch

from tokenmill_engine.layers.embedding import TokenEmbedding
from tokenmill_engine.layers.placement import Placement, Target
from tokenmill_kernels import ops


class RMSNorm:
    """x / rms(x) * weight over the last dimension, fused with the operation in front of it."""

    __slots__ = ("_group", "eps", "weight")

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        self._group = None if placement.group.size == 1 else placement.group
        self.weight = placement.empty(size)
        self.eps = eps

    def targets(self, name: str) -> Iterator[tuple[str, Target]]:
        """(checkpoint name, place)."""
        yield f"{name}.weight", Target.of_whole(self.weight)

    def embed(self, input_ids: torch.Tensor, table: TokenEmbedding) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(rows), rows) of the embeddings of int32 [num_tokens], both [num_tokens, size]."""
        if self._group is None:
            return ops.embed_rms_norm(input_ids, table.weight, self.weight, self.eps)
        return self._group.add_rms_norm(table(input_ids), None, self.weight, self.eps)

    def begin(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(rows), rows), both [num_tokens, size]. Of several workers each has a part of the rows, a sum."""
        if self._group is None:
            return ops.rms_norm(rows, self.weight, self.eps), rows
        return self._group.add_rms_norm(rows, None, self.weight, self.eps)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual), both [num_tokens, size]; the norm in `out` if that is given. Of several
        workers each has a part of `x`, a sum, and all of `residual`. Both may be overwritten."""
        if self._group is None:
            return ops.add_rms_norm(x, residual, self.weight, self.eps, out=out)
        return self._group.add_rms_norm(x, residual, self.weight, self.eps, out)
