"""Workers on the GPUs of one host: small sums and gathers go through memory that all of them map, larger ones through
NCCL. What the host has to agree on goes through the group of the host's processes.

All of it runs on the current stream and may be captured in graphs.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from tokenmill_engine.distributed import nccl
from tokenmill_engine.distributed.group import Group, norm_sum
from tokenmill_engine.distributed.peer_memory import PeerMemoryError
from tokenmill_engine.distributed.peer_reduce import PeerReduce

logger = logging.getLogger(__name__)


class Collectives(Protocol):
    """As `nccl.Communicator` has them."""

    def all_reduce(self, x: torch.Tensor) -> None:
        """`x` becomes the sum of all members' x."""

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """`out` takes all members' x one after another, by rank."""


def connect(host: Group, device: torch.device, *, use_peer_memory: bool) -> "NcclGroup":
    """The group on GPUs of the members of `host`, each of which calls this. `device` is this one's, and the current one
    of the calling thread. Without `use_peer_memory` all goes through NCCL, and so it does, after a warning, where the
    GPUs cannot map each other's memory.

    Raises:
        StartupError: NCCL cannot connect them.
    """
    unique_id = exchange(host, nccl.new_id() if host.rank == 0 else bytes(nccl.ID_BYTES))[0]
    collectives = nccl.Communicator(host.rank, host.size, device, unique_id)
    peers = None
    if use_peer_memory:
        try:
            peers = PeerReduce(host.rank, host.size, device, lambda data: exchange(host, data))
        except PeerMemoryError as error:
            if host.rank == 0:
                logger.warning("GPUs cannot map each other's memory, all sums go through NCCL: %s", error)
    group = NcclGroup(host, collectives, peers)
    # NCCL sets much up in its first calls.
    for size in (1, 1 << 20):
        collectives.all_reduce(torch.zeros(size, device=device))
        collectives.all_gather(torch.zeros(host.size * size, device=device), torch.zeros(size, device=device))
    torch.cuda.synchronize(device)
    return group


def exchange(host: Group, data: bytes) -> list[bytes]:
    """What all members of `host` bring, by rank: as many bytes from each."""
    everything = host.all_gather(torch.frombuffer(bytearray(data), dtype=torch.uint8).view(1, -1))
    return [bytes(row.tolist()) for row in everything.view(host.size, -1)]


class NcclGroup:
    """A `Group`. A call that fails means that it is broken: EngineDeadError."""

    def __init__(self, host: Group, collectives: Collectives, peers: PeerReduce | None) -> None:
        self.rank, self.size = host.rank, host.size
        self._host, self._collectives, self._peers = host, collectives, peers
        self._is_silent = False

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Nothing goes through NCCL or to the host's others meanwhile: results have their shape and any values. For
        calls that are made to see which kernels they launch, and whose launches compute nothing."""
        self._is_silent = True
        try:
            yield
        finally:
            self._is_silent = False

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self._peers is not None and self._peers.takes(x):
            return self._peers.all_reduce(x)
        return self._sum_by_nccl(x)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._peers is not None and self._peers.takes(x):
            return self._peers.add_rms_norm(x, residual, weight, eps, out)
        return norm_sum(self._sum_by_nccl(x), residual, weight, eps, out)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        if self._peers is not None and self._peers.takes_gather(x):
            return self._peers.all_gather(x)
        num_rows, width = x.shape
        gathered = x.new_empty(self.size, num_rows, width)
        if not self._is_silent:
            self._collectives.all_gather(gathered, x.contiguous())
        # Of a single row nothing is copied.
        return gathered.transpose(0, 1).reshape(num_rows, self.size * width)

    def agree_min(self, value: int) -> int:
        return value if self._is_silent else self._host.agree_min(value)

    def _sum_by_nccl(self, x: torch.Tensor) -> torch.Tensor:
        if not self._is_silent:
            self._collectives.all_reduce(x)
        return x
