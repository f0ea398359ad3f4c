"""Stages of a pipeline on the GPUs of one host: what one hands to the next goes from device memory to device memory
through NCCL. What the hosts have to agree on goes through the chain of their processes.
"""

import torch

from tokenmill_engine.distributed import nccl
from tokenmill_engine.distributed.chain import Chain

_FIRST_SIZES = (1, 1 << 20)
_FIRST_TAG = 0


def connect(host: Chain, device: torch.device) -> "NcclChain":
    """The chain on GPUs of the members of `host`, each of which calls this. `device` is this one's, and the current one
    of the calling thread.

    Raises:
        StartupError: NCCL cannot connect them.
    """
    # One communicator for each two neighbours: the calls of one wait for each other, and a stage takes a step in while
    # it hands on the one before. They are made from the first to the last, so nobody waits for who waits for him.
    before = after = None
    if host.rank > 0:
        before = nccl.Communicator(1, 2, device, _receive_id(host))
    if host.rank < host.size - 1:
        unique_id = nccl.new_id()
        host.send(torch.frombuffer(bytearray(unique_id), dtype=torch.uint8), _FIRST_TAG)
        after = nccl.Communicator(0, 2, device, unique_id)
    chain = NcclChain(host, before, after)
    # NCCL sets much up in the first calls, where the host waits for the neighbours.
    for size in _FIRST_SIZES:
        for link, call in ((before, chain.receive), (after, chain.send)):
            if link is not None:
                call(torch.zeros(size, dtype=torch.uint8, device=device), _FIRST_TAG)
        torch.cuda.synchronize(device)
    chain.received_tag = None
    return chain


def _receive_id(host: Chain) -> bytes:
    received = host.receive(torch.empty(nccl.ID_BYTES, dtype=torch.uint8), _FIRST_TAG)
    return bytes(received.tolist())


class NcclChain:
    """A `Chain` whose calls only enqueue, on the current stream. There, `receive` waits for the stage before, and
    `send`, of more than NCCL keeps, for the next one. Messages come in the order in which they were sent; tags are not
    compared. A call that fails means that the chain is broken: EngineDeadError."""

    def __init__(self, host: Chain, before: nccl.Communicator | None, after: nccl.Communicator | None) -> None:
        """`before` and `after`: the communicators with the two neighbours, where there is one."""
        self.rank, self.size = host.rank, host.size
        self._host, self._before, self._after = host, before, after
        self.received_tag: int | None = None

    def send(self, x: torch.Tensor, tag: int) -> None:
        assert self._after is not None
        self._after.send(x, 1)

    def receive(self, out: torch.Tensor, tag: int) -> torch.Tensor:
        assert self._before is not None
        self._before.receive(out, 0)
        self.received_tag = tag
        return out

    def agree_min(self, value: int) -> int:
        return self._host.agree_min(value)
