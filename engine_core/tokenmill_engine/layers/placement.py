"""Where parameters live: on which device, and which part of each on which of the workers that share a model."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenmill_engine.distributed.group import ALONE, Group


@dataclass(frozen=True, slots=True)
class Share:
    """`count` of `total` things in a row, from `first` on."""

    first: int
    count: int
    total: int

    @property
    def is_whole(self) -> bool:
        return self.count == self.total

    def times(self, size: int) -> "Share":
        """The same in smaller things, `size` to each."""
        return Share(self.first * size, self.count * size, self.total * size)


def whole(total: int) -> Share:
    """All of `total` things."""
    return Share(0, total, total)


@dataclass(frozen=True, slots=True)
class Target:
    """A place for a checkpoint's tensor, or for the part of it that this worker has."""

    view: torch.Tensor
    """Of the parameter, with the shape of the part."""
    part: tuple[Share, ...]
    """Which part, along each dimension of the tensor."""
    stacked: int = 1
    """The tensor is as many of equal size one after another, of each of which this is the part."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        first, *rest = (share.total for share in self.part)
        return (first * self.stacked, *rest)

    def single(self) -> "list[Target]":
        """Targets of parts without gaps, in order, each of the whole tensor."""
        if self.stacked == 1:
            return [self]
        first, *rest = self.part
        total = first.total * self.stacked
        shares = (Share(first.first + index * first.total, first.count, total) for index in range(self.stacked))
        views = self.view.chunk(self.stacked)
        return [Target(view, (share, *rest)) for view, share in zip(views, shares, strict=True)]

    @classmethod
    def of_whole(cls, view: torch.Tensor) -> "Target":
        return cls(view, tuple(map(whole, view.shape)))


def cut(tensor: torch.Tensor, part: Sequence[Share]) -> torch.Tensor:
    """The part of a whole tensor, a view."""
    return tensor[tuple(slice(share.first, share.first + share.count) for share in part)]


@dataclass(frozen=True, slots=True)
class Placement:
    """Type and device of a model's parameters, and the workers that have them between them."""

    dtype: torch.dtype
    device: torch.device
    group: Group = ALONE

    def empty(self, *shape: int) -> torch.Tensor:
        """An uninitialised parameter: the loader fills it."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def share(self, total: int) -> Share:
        """This worker's part of `total` heads or columns, which divide by the number of workers; or the one that
        several workers in a row have, where it is the number of workers that divides by theirs."""
        rank, size = self.group.rank, self.group.size
        return Share(rank * total // size, max(1, total // size), total)

    def even(self, total: int, unit: int = 1) -> Share:
        """This worker's part of `total` things that need not divide by the number of workers: as even as can be in
        pieces of `unit`. Some workers may have nothing of fewer things than there are workers."""
        rank, size = self.group.rank, self.group.size
        num_units = -(-total // unit)
        first, end = (min(total, each * num_units // size * unit) for each in (rank, rank + 1))
        return Share(first, end - first, total)

    def run(self, total: int) -> Share:
        """This worker's part of `total` things that need not divide: as many on each worker, fewer on the last."""
        longest = self.longest_run(total)
        first = self.group.rank * longest
        return Share(first, min(longest, total - first), total)

    def longest_run(self, total: int) -> int:
        """Things in a `run` of any worker but the last."""
        return -(-total // self.group.size)
