"""How stages on GPUs find each other and what goes between them, with NCCL replaced by queues."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

import pytest
import torch

from tokenmill_engine.distributed import nccl, nccl_chain
from tokenmill_engine.distributed.nccl_chain import NcclChain
from tokenmill_engine.distributed.torch_group import join

CPU = torch.device("cpu")
DEADLINE_S = 60.0


class Links:
    """Communicators of two members that know each other by the same number. As NCCL's, one is there when both are, and
    the first call of either waits for the other's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_ids = 0
        self._links: dict[bytes, tuple[threading.Barrier, Queue[torch.Tensor]]] = {}

    def new_id(self) -> bytes:
        with self._lock:
            self._num_ids += 1
            return self._num_ids.to_bytes(nccl.ID_BYTES, "little")

    def communicator(self, rank: int, size: int, device: torch.device, unique_id: bytes) -> "Link":
        assert size == 2
        with self._lock:
            barrier, messages = self._links.setdefault(unique_id, (threading.Barrier(2), Queue()))
        barrier.wait(DEADLINE_S)
        return Link(rank, barrier, messages)


class Link:
    def __init__(self, rank: int, barrier: threading.Barrier, messages: "Queue[torch.Tensor]") -> None:
        self._rank, self._barrier, self._messages = rank, barrier, messages
        self._is_new = True

    def send(self, x: torch.Tensor, rank: int) -> None:
        assert (self._rank, rank) == (0, 1)
        self._meet()
        self._messages.put(x.clone())

    def receive(self, out: torch.Tensor, rank: int) -> None:
        assert (self._rank, rank) == (1, 0)
        self._meet()
        message = self._messages.get(timeout=DEADLINE_S)
        assert message.shape == out.shape
        out.copy_(message)

    def _meet(self) -> None:
        if self._is_new:
            self._barrier.wait(DEADLINE_S)
        self._is_new = False


@pytest.fixture
def on_chain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[list[int]]]:
    links = Links()
    monkeypatch.setattr(nccl, "new_id", links.new_id)
    monkeypatch.setattr(nccl, "Communicator", links.communicator)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def run(size: int, work: Callable[[NcclChain], list[int]]) -> list[list[int]]:
        """Results of `work` on every member, by rank."""

        def member(rank: int) -> list[int]:
            host = join(rank, size, tmp_path / "store")
            try:
                chain = nccl_chain.connect(host, CPU)
                assert (chain.rank, chain.size, chain.received_tag) == (rank, size, None)
                return work(chain)
            finally:
                host.agree_min(0)  # nobody leaves before all are done
                host.close()

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(member, range(size)))

    return run


@pytest.mark.parametrize("size", [2, 3])
def test_messages_go_from_stage_to_stage_in_order(size: int, on_chain: Callable[..., list[list[int]]]) -> None:
    def relay(chain: NcclChain) -> list[int]:
        passed = []
        for step in range(5):
            message = torch.tensor([10 * step])
            if chain.rank > 0:
                assert chain.receive(message, step) is message
                assert chain.received_tag == step
            passed.append(int(message) + chain.rank)
            if chain.rank < chain.size - 1:
                chain.send(torch.tensor([passed[-1]]), step)
        return passed

    # Each adds its rank to what comes in.
    sums = [rank * (rank + 1) // 2 for rank in range(size)]
    assert on_chain(size, relay) == [[10 * step + total for step in range(5)] for total in sums]


def test_what_the_hosts_agree_on(on_chain: Callable[..., list[list[int]]]) -> None:
    assert on_chain(3, lambda chain: [chain.agree_min(7 - chain.rank)]) == [[5]] * 3
