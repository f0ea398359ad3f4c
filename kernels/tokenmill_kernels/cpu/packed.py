"""A weight matrix rearranged for the CPU library. What the arrangement is, only the library knows."""

from dataclasses import dataclass

import torch


@dataclass(slots=True, frozen=True)
class PackedWeight:
    """A packed bfloat16 matrix [out_features, in_features] (padded inside to the library's tile)."""

    data: torch.Tensor
    """bfloat16, one dimension."""
    out_features: int
    in_features: int

    @property
    def shape(self) -> tuple[int, int]:
        return (self.out_features, self.in_features)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype
