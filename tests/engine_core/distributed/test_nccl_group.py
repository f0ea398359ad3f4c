"""What a group on GPUs sends which way, with threads in place of GPUs: sums and gathers are real, NCCL and peer memory
are what the threads say to each other. `tests/gpu/test_parallel.py` has the real ones."""

from collections.abc import Callable
from typing import TypeVar, cast

import pytest
import torch
from torch.nn import functional as F

from tests.support.model_loading import CPU, load_op_by_op, model_config
from tests.support.paged_forward import PagedForward
from tests.support.thread_group import ThreadGroup, on_every_rank, thread_groups
from tests.support.tiny_models import cached_tiny_model
from tokenmill_engine.distributed.nccl_group import NcclGroup, exchange
from tokenmill_engine.distributed.peer_reduce import PeerReduce
from tokenmill_engine.models.loader import build_model, load_weights

Result = TypeVar("Result")

LIMIT = 64
"""Numbers that peer memory takes."""


class Library:
    """As NCCL."""

    def __init__(self, host: ThreadGroup) -> None:
        self._host = host
        self.shapes: list[tuple[int, ...]] = []

    def all_reduce(self, x: torch.Tensor) -> None:
        self.shapes.append(x.shape)
        x.copy_(self._host.all_reduce(x))

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        assert x.is_contiguous()
        self.shapes.append(x.shape)
        parts = self._host.all_gather(x.view(1, -1))
        out.copy_(parts.view(out.shape))


class Memory:
    """As peer memory, for few numbers."""

    def __init__(self, host: ThreadGroup) -> None:
        self._host = host
        self.shapes: list[tuple[int, ...]] = []

    def takes(self, x: torch.Tensor) -> bool:
        return x.numel() <= LIMIT

    takes_gather = takes

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.shapes.append(x.shape)
        return x.copy_(self._host.all_reduce(x))

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.shapes.append(x.shape)
        return self._host.add_rms_norm(x, residual, weight, eps, out)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self.shapes.append(x.shape)
        return self._host.all_gather(x)


class Member:
    """One of the threads."""

    def __init__(self, host: ThreadGroup, has_memory: bool) -> None:
        self.host, self.library, self.memory = host, Library(host), Memory(host)
        peers = cast(PeerReduce, self.memory) if has_memory else None
        self.group = NcclGroup(host, self.library, peers)


def on_members(
    work: Callable[[Member], Result], size: int = 2, has_memory: bool = True
) -> tuple[list[Result], list[Member]]:
    """What `work` gives on each member, and the members."""
    hosts = thread_groups(size)
    members = [Member(host, has_memory) for host in hosts]
    return on_every_rank(hosts, lambda host: work(members[host.rank])), members


def values(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("has_memory", [True, False])
@pytest.mark.parametrize("num_rows", [1, 4, 5])
def test_sums_of_few_numbers_go_through_memory(num_rows: int, has_memory: bool) -> None:
    def work(member: Member) -> torch.Tensor:
        return member.group.all_reduce(values(member.group.rank, num_rows, 16))

    results, members = on_members(work, has_memory=has_memory)
    for result in results:
        assert torch.equal(result, values(0, num_rows, 16) + values(1, num_rows, 16))
    through_memory = has_memory and num_rows <= 4
    for member in members:
        assert len(member.memory.shapes) == through_memory
        assert len(member.library.shapes) == (not through_memory)


@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize("num_rows", [2, 9])
def test_a_norm_is_that_of_the_sum(num_rows: int, has_residual: bool) -> None:
    scale, residual = values(7, 16), values(8, num_rows, 16)
    total = values(0, num_rows, 16) + values(1, num_rows, 16) + (residual if has_residual else 0)

    def work(member: Member) -> tuple[torch.Tensor, torch.Tensor]:
        x = values(member.group.rank, num_rows, 16)
        out = torch.empty(num_rows, 16)
        normed, stream = member.group.add_rms_norm(x, residual.clone() if has_residual else None, scale, 1e-5, out)
        assert normed is out
        return normed, stream

    results, members = on_members(work)
    for normed, stream in results:
        torch.testing.assert_close(stream, total)
        torch.testing.assert_close(normed, F.rms_norm(total, (16,), scale, 1e-5))
    assert [len(member.memory.shapes) for member in members] == [num_rows == 2] * 2


@pytest.mark.parametrize("has_memory", [True, False])
@pytest.mark.parametrize("num_rows", [1, 3, 30])
def test_gathered_rows_are_by_rank_along_the_last_dimension(num_rows: int, has_memory: bool) -> None:
    expected = torch.cat([values(rank, num_rows, 8)[:, ::2] for rank in range(3)], dim=1)
    results, _ = on_members(
        lambda member: member.group.all_gather(values(member.group.rank, num_rows, 8)[:, ::2]), 3, has_memory
    )
    for result in results:
        assert torch.equal(result, expected)
        assert result.is_contiguous()


def test_in_silence_nothing_is_said_through_nccl() -> None:
    """By one member alone: nobody answers."""
    host = thread_groups(2)[0]
    member = Member(host, has_memory=False)
    with member.group.silence():
        assert member.group.all_reduce(torch.ones(9, 16)).shape == (9, 16)
        assert member.group.all_gather(torch.ones(9, 16)).shape == (9, 32)
        normed, stream = member.group.add_rms_norm(torch.ones(9, 16), None, torch.ones(16), 1e-5)
        assert normed.shape == stream.shape == (9, 16)
        assert member.group.agree_min(7) == 7
    assert member.library.shapes == []
    assert host.calls == []


def test_bytes_are_exchanged_and_numbers_agreed_on_between_processes() -> None:
    def work(member: Member) -> tuple[list[bytes], int]:
        rank = member.group.rank
        return exchange(member.host, bytes([rank, 255, 0])), member.group.agree_min(5 - rank)

    results, members = on_members(work, 3)
    assert results == [([bytes([rank, 255, 0]) for rank in range(3)], 3)] * 3
    assert not any(member.library.shapes or member.memory.shapes for member in members)


@pytest.mark.parametrize("has_memory", [True, False])
def test_a_model_is_what_it_is_on_one_worker(has_memory: bool) -> None:
    folder = cached_tiny_model("qwen3", num_attention_heads=4, num_key_value_heads=2)
    config = model_config(folder)
    steps = [[("a", list(range(3, 30)))], [("a", [5]), ("b", list(range(40, 50)))]]

    def run(paged: PagedForward) -> list[torch.Tensor]:
        hidden = [paged.model.forward(paged.prepare(step), paged.kv_caches) for step in steps]
        return [
            result for each in hidden for result in (paged.model.compute_logits(each), paged.model.argmax_token(each))
        ]

    def work(member: Member) -> list[torch.Tensor]:
        model = build_model(config, CPU, group=member.group)
        load_weights(model, config)
        model.finalize()
        return run(PagedForward(model))

    expected = run(PagedForward(load_op_by_op(folder)))
    results, members = on_members(work, has_memory=has_memory)
    for result in results:
        for ours, first, whole in zip(result, results[0], expected, strict=True):
            assert torch.equal(ours, first)
            torch.testing.assert_close(ours, whole, atol=1e-4, rtol=1e-4)
    for member in members:
        assert bool(member.memory.shapes) == has_memory
        assert member.library.shapes
