"""Workers that compute one model together, as each of them sees the others. Knows nothing of how they talk."""

from typing import Final, Protocol

import torch

from tokenmill_kernels import ops


class Group(Protocol):
    """One member's view. Every member calls the same methods in the same order with tensors of the same shape and
    dtype; each call ends when the results of all are in, as seen by later work on the tensor's device."""

    @property
    def rank(self) -> int:
        """This member's number, 0 to size - 1."""

    @property
    def size(self) -> int:
        """Members. Those of 1 are never called: layers look at the size when they are made."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all members' `x`, with the same bits on every one of them. May be `x` itself, overwritten.
        What is summed is contiguous."""

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `ops.add_rms_norm`, of the sum of all members' `x` [num_rows, width]; the rest is the same on every one of
        them, and so are the bits of the results. Without a `residual` the sum itself takes its place. `x` may be
        overwritten."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, n] of each member -> [num_rows, size * n], by rank along the last dimension."""

    def agree_min(self, value: int) -> int:
        """The smallest `value` of all members. Waits on the host."""


def norm_sum(
    total: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Group.add_rms_norm` for members that have the whole sum."""
    if residual is not None:
        return ops.add_rms_norm(total, residual, weight, eps, out=out)
    normed = ops.rms_norm(total, weight, eps)
    return normed if out is None else out.copy_(normed), total


class _Alone:
    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return norm_sum(x, residual, weight, eps, out)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def agree_min(self, value: int) -> int:
        return value


ALONE: Final[Group] = _Alone()
"""A worker that has the whole model."""
