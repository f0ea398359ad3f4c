"""Sums through peer memory: by processes that share memory on the CPU, with kernels in the interpreter. `tests/gpu` has
them on GPUs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.peer_processes import run_scenario
from tokenmill_engine.distributed.peer_memory import PeerMemoryError, share_memory
from tokenmill_engine.distributed.peer_reduce import PeerReduce
from tokenmill_kernels.gpu import peer_reduce
from tokenmill_kernels.gpu.launch import device_limits

CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "name"),
    [(2, "every shape"), (2, "special"), (3, "any order"), (3, "late"), (4, "any order")],
)
def test_members_get_the_sum_with_the_same_bits(tmp_path: Path, size: int, name: str) -> None:
    run_scenario(size, tmp_path, "cpu", name)


def alone(data: bytes) -> list[bytes]:
    return [data]


def test_what_is_too_large_or_of_another_type_is_not_taken() -> None:
    peers = PeerReduce(0, 1, CPU, alone, max_bytes=1 << 16, one_shot_bytes=1 << 12)
    assert peers.takes(torch.empty(4, 1024, dtype=torch.bfloat16))
    assert peers.takes(torch.empty(32, 1024, dtype=torch.bfloat16))
    assert not peers.takes(torch.empty(33, 1024, dtype=torch.bfloat16))
    assert not peers.takes(torch.empty(1, 8, dtype=torch.int32))
    assert peers.takes_gather(torch.empty(2, 512))
    assert not peers.takes_gather(torch.empty(3, 512))
    assert not peers.takes_gather(torch.empty(1, 8, dtype=torch.int32))


def test_narrow_rows_are_taken_only_if_they_fit() -> None:
    """In a slot rows begin at multiples of 16 bytes."""
    peers = PeerReduce(0, 1, CPU, alone)
    assert peers.takes(torch.empty(1 << 16, 1, dtype=torch.bfloat16))
    assert not peers.takes(torch.empty(1 << 20, 1, dtype=torch.bfloat16))


def test_nothing_can_be_summed_and_gathered_too() -> None:
    peers = PeerReduce(0, 1, CPU, alone)
    nothing = torch.empty(0, 8)
    assert peers.all_reduce(nothing) is nothing
    assert peers.all_gather(nothing).shape == (0, 8)
    assert [x.shape for x in peers.add_rms_norm(nothing, None, torch.ones(8), 1e-5)] == [(0, 8), (0, 8)]


def test_a_few_numbers_are_gathered_by_as_many_programs_as_a_sum_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """They empty what a sum of as many rows has left, which takes a single program longer than all else."""
    grids = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *arguments, **options: None

    monkeypatch.setattr(peer_reduce, "gather_kernel", Kernel())
    peers = PeerReduce(0, 1, CPU, alone)
    for num_rows in (1, 2, 9):
        peers.all_gather(torch.zeros(num_rows, 2))
    assert grids == [(1,), (2,), (device_limits(CPU).num_sms,)]


def test_memory_is_filled_and_mapped() -> None:
    memory = share_memory(1000, 0xAB, 0, 1, CPU, alone)
    assert memory.own.shape == (1000,)
    assert (memory.own == 0xAB).all()
    assert memory.addresses.tolist() == [memory.own.data_ptr()]


def test_who_cannot_map_says_why_on_all_members() -> None:
    """The other member's file is gone when it is to be mapped."""

    def exchange(data: bytes) -> list[bytes]:
        return [data, bytes(len(data))]

    with pytest.raises(PeerMemoryError, match=r"^worker 0: .*/proc/0/fd/0"):
        share_memory(1000, 0, 0, 2, CPU, exchange)


def test_another_members_problem_is_told_here_too() -> None:
    def exchange(data: bytes) -> list[bytes]:
        return [data, b"no such memory".ljust(len(data), b"\0") if len(data) > 64 else data]

    with pytest.raises(PeerMemoryError, match=r"^worker 1: no such memory$"):
        share_memory(1000, 0, 0, 2, CPU, exchange)
