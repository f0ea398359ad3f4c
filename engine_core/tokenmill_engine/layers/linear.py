"""Matrix multiplications, and where the rows and columns of each checkpoint tensor go in them.

Several workers that share a model have the rows of a matrix between them, and then each makes a part of the results;
or the columns, and then each makes a part of every result's sum. The norm behind adds these parts up.
"""

from collections.abc import Iterator, Mapping

import torch

from tokenmill_engine.layers.placement import Placement, Share, Target
from tokenmill_kernels import ops


class Linear:
    """x @ weight.T + bias, for one projection or for several of the same input stacked into one matrix.

    `outputs` maps the name of each projection to its rows, in stacking order. Between construction and `finalize` the
    weight is a plain matrix [rows here, columns here] for the loader; afterwards it has the form that the device's
    kernel likes best.
    """

    __slots__ = ("_added_bias", "_inputs", "_outputs", "bias", "weight")

    def __init__(self, inputs: Share, outputs: Mapping[str, Share], has_bias: bool, placement: Placement) -> None:
        """With a part of the columns (`inputs`), rows must be whole."""
        self._inputs = inputs
        self._outputs = dict(outputs)
        out_features = sum(rows.count for rows in outputs.values())
        self.weight: torch.Tensor | ops.PackedWeight = placement.empty(out_features, inputs.count)
        self.bias = placement.empty(out_features) if has_bias else None
        # All workers have the bias of a sum, and one adds it.
        self._added_bias = self.bias if inputs.is_whole or placement.group.rank == 0 else None

    @property
    def plain_weight(self) -> torch.Tensor:
        """The matrix as rows of numbers. Raises RuntimeError after it was packed."""
        if isinstance(self.weight, ops.PackedWeight):
            raise RuntimeError("the weight was packed: its rows are gone")
        return self.weight

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """(checkpoint name, place) for each stacked projection. Valid until `finalize`."""
        first = 0
        for name, share in self._outputs.items():
            rows = slice(first, first + share.count)
            yield f"{prefix}{name}.weight", Target(self.plain_weight[rows], (share, self._inputs))
            if self.bias is not None:
                yield f"{prefix}{name}.bias", Target(self.bias[rows], (share,))
            first += share.count

    def finalize(self) -> None:
        """Packs the loaded weight and lets the plain one go."""
        if isinstance(self.weight, torch.Tensor):
            self.weight = ops.pack_linear(self.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, columns here] -> [num_tokens, rows here]; with a part of the columns, a part of that sum."""
        return ops.linear(x, self.weight, self._added_bias)
