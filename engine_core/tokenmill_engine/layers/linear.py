"""Matrix multiplications, and where the rows of each checkpoint tensor go in them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from tokenmill_kernels import ops


@dataclass(frozen=True, slots=True)
class Placement:
    """Type and device of a model's parameters."""

    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> torch.Tensor:
        """An uninitialised parameter: the loader fills it."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class Linear:
    """x @ weight.T + bias, for one projection or for several of the same input stacked into one matrix.

    `outputs` maps the name of each projection to its number of rows, in stacking order. Between construction and
    `finalize` the weight is a plain matrix [sum of rows, in_features] for the loader; afterwards it has the form
    that the device's kernel likes best.
    """

    __slots__ = ("_outputs", "bias", "weight")

    def __init__(self, in_features: int, outputs: Mapping[str, int], has_bias: bool, placement: Placement) -> None:
        self._outputs = dict(outputs)
        out_features = sum(outputs.values())
        self.weight: torch.Tensor | ops.PackedWeight = placement.empty(out_features, in_features)
        self.bias = placement.empty(out_features) if has_bias else None

    @property
    def plain_weight(self) -> torch.Tensor:
        """The matrix as rows of numbers. Raises RuntimeError after it was packed."""
        if isinstance(self.weight, ops.PackedWeight):
            raise RuntimeError("the weight was packed: its rows are gone")
        return self.weight

    def targets(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, view to fill) for each stacked projection. Valid until `finalize`."""
        first = 0
        for name, num_rows in self._outputs.items():
            rows = slice(first, first + num_rows)
            yield f"{prefix}{name}.weight", self.plain_weight[rows]
            if self.bias is not None:
                yield f"{prefix}{name}.bias", self.bias[rows]
            first += num_rows

    def finalize(self) -> None:
        """Packs the loaded weight and lets the plain one go."""
        if isinstance(self.weight, torch.Tensor):
            self.weight = ops.pack_linear(self.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, in_features] -> [num_tokens, out_features]."""
        return ops.linear(x, self.weight, self.bias)
