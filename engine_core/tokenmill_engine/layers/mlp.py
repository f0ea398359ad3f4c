"""The gated feed-forward block (SwiGLU, arXiv:2002.05202)."""

from collections.abc import Iterator

import torch

from tokenmill_engine.layers.linear import Linear
from tokenmill_engine.layers.placement import Placement, Share, Target, whole
from tokenmill_kernels import ops


class GatedMLP:
    """down(silu(gate(x)) * up(x)), gate and up as one matrix. Workers have the width between them."""

    __slots__ = ("down_proj", "gate_up_proj")

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        has_bias: bool,
        placement: Placement,
        width: Share | None = None,
    ) -> None:
        """`width`: of this worker, where it is not an equal share."""
        hidden, width = whole(hidden_size), width or placement.share(intermediate_size)
        self.gate_up_proj = Linear(hidden, {"gate_proj": width, "up_proj": width}, has_bias, placement)
        self.down_proj = Linear(width, {"down_proj": hidden}, has_bias, placement)

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """(checkpoint name, place) of every parameter."""
        yield from self.gate_up_proj.targets(prefix)
        yield from self.down_proj.targets(prefix)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, hidden_size], of several workers a part of that sum from each."""
        gate_up = self.gate_up_proj
        return self.down_proj(ops.gated_linear(hidden, gate_up.weight, gate_up.bias))
