"""Sums over the GPUs of one host through memory that all of them map, quicker than NCCL where tensors are small.

What is summed is any tensor: kernels send it into the receive areas of the other members. Nothing here waits on the
host, and every call may be captured in a CUDA graph.
"""

import torch

from tokenmill_engine.distributed.peer_memory import Exchange

MAX_BYTES = 4 << 20
"""Largest tensor that goes this way."""


class PeerReduce:
    """One member's view. All members make the same calls in the same order, with tensors of the same shape and dtype
    (bfloat16, float16 or float32), on one stream or on streams that wait for each other."""

    def __init__(
        self, rank: int, size: int, device: torch.device, exchange: Exchange, max_bytes: int = MAX_BYTES
    ) -> None:
        """`exchange` gathers bytes of all members, as many from each, by rank; it is called a few times, here only.

        Raises:
            PeerMemoryError: on all members alike, if one of them cannot map the memory of another.
        """

    def takes(self, x: torch.Tensor) -> bool:
        """Whether `all_reduce` and `add_rms_norm` can sum `x` [num_rows, width]: it is small enough and has rows."""
        raise NotImplementedError

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, contiguous, after it was overwritten with the sum of all members' x: added in float32 in the order of
        ranks and rounded once, so with the same bits on every member."""
        raise NotImplementedError

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `ops.add_rms_norm` of the sum that `all_reduce` gives: (norm, residual), each [num_rows, width], the norm
        in `out` if that is given. `residual` is overwritten; without one the sum itself comes in its place, in new
        memory. `x` stays as it is."""
        raise NotImplementedError

    def takes_gather(self, x: torch.Tensor) -> bool:
        """Whether `all_gather` can take `x`."""
        raise NotImplementedError

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, n] of each member -> [num_rows, size * n], by rank along the last dimension."""
        raise NotImplementedError
