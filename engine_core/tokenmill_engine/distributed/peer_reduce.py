"""Sums over the GPUs of one host through memory that all of them map, quicker than NCCL where tensors are small.

What is summed is any tensor: kernels send it into the receive areas of the other members. Nothing here waits on the
host, and every call may be captured in a CUDA graph. Since kernels themselves count the calls (see
`tokenmill_kernels.gpu.peer_protocol`), graphs may be replayed in any order, with calls outside of graphs between.
"""

import torch

from tokenmill_engine.distributed.peer_memory import Exchange, share_memory
from tokenmill_kernels.gpu import peer_reduce as kernels
from tokenmill_kernels.gpu.peer_protocol import FILL, NUM_SLOTS, NUM_STATE_WORDS, UNIT_BYTES, Peers

_MAX_BYTES = {2: 16 << 20}
"""Largest tensor that is summed this way, by the number of members. That of two was measured; its receive area takes
about 100 MB."""
_MANY_MAX_BYTES = 4 << 20
_ONE_SHOT_BYTES = {2: 2 << 20, 3: 1 << 20, 4: 512 << 10}
"""Up to this size every member sends everything to every other one, by their number. That of two was measured, where
a norm follows."""
_MANY_ONE_SHOT_BYTES = 128 << 10
_SPARE_BYTES = 1 << 20
"""For what is rounded up in a slot."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class PeerReduce:
    """One member's view. All members make the same calls in the same order, with tensors of the same shape and dtype
    (bfloat16, float16 or float32), on one stream or on streams that wait for each other."""

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        exchange: Exchange,
        max_bytes: int | None = None,
        one_shot_bytes: int | None = None,
        overlap: bool = True,
    ) -> None:
        """`exchange` gathers bytes of all members, as many from each, by rank; it is called a few times, here only.
        `overlap` lets kernels start while those before them end.

        Raises:
            PeerMemoryError: on all members alike, if one of them cannot map the memory of another.
        """
        largest = _MAX_BYTES.get(size, _MANY_MAX_BYTES) if max_bytes is None else max_bytes
        limit = _ONE_SHOT_BYTES.get(size, _MANY_ONE_SHOT_BYTES) if one_shot_bytes is None else one_shot_bytes
        self._max_bytes, self._one_shot_bytes = largest, min(limit, largest)
        self._overlap = overlap
        slot_bytes = max(size * self._one_shot_bytes, 2 * largest) // UNIT_BYTES * UNIT_BYTES + _SPARE_BYTES
        state = torch.zeros(NUM_STATE_WORDS, dtype=torch.int32, device=device)
        self._memory = share_memory(NUM_SLOTS * slot_bytes, FILL, rank, size, device, exchange)
        self._peers = Peers(rank, size, self._memory.addresses, state, slot_bytes)

    def takes(self, x: torch.Tensor) -> bool:
        """Whether `all_reduce` and `add_rms_norm` can sum `x` [num_rows, width]: it is small enough."""
        if x.nbytes > self._max_bytes or x.dtype not in _DTYPES:
            return False
        size, two_shot = self._peers.size, self._is_two_shot(x)
        flat, rows = (measure(x, size, two_shot) for measure in (kernels.flat_slot_bytes, kernels.norm_slot_bytes))
        return max(flat, rows) <= self._peers.slot_bytes

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, contiguous, after it was overwritten with the sum of all members' x: added in float32 in the order of
        ranks and rounded once, so with the same bits on every member."""
        return kernels.all_reduce(x, self._peers, self._is_two_shot(x), self._overlap)

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
        two_shot = self._is_two_shot(x)
        return kernels.add_rms_norm(x, residual, weight, eps, out, self._peers, two_shot, self._overlap)

    def takes_gather(self, x: torch.Tensor) -> bool:
        """Whether `all_gather` can take `x` [num_rows, n]: it is small enough."""
        return (
            x.nbytes <= self._one_shot_bytes
            and x.dtype in _DTYPES
            and kernels.flat_slot_bytes(x, self._peers.size, two_shot=False) <= self._peers.slot_bytes
        )

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, n] of each member -> [num_rows, size * n], by rank along the last dimension."""
        return kernels.all_gather(x.contiguous(), self._peers, self._overlap)

    def _is_two_shot(self, x: torch.Tensor) -> bool:
        return x.nbytes > self._one_shot_bytes
