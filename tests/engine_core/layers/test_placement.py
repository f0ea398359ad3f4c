"""Parts of things that workers have between them."""

import pytest
import torch

from tests.support.thread_group import thread_groups
from tokenmill_engine.layers.placement import Placement, Share, Target, cut, whole


def placements(size: int) -> list[Placement]:
    return [Placement(torch.float32, torch.device("cpu"), group) for group in thread_groups(size)]


@pytest.mark.parametrize(("total", "size"), [(12, 1), (12, 2), (12, 3), (12, 4), (4, 4)])
def test_shares_that_divide_cover_everything_once(total: int, size: int) -> None:
    shares = [placement.share(total) for placement in placements(size)]
    assert [index for share in shares for index in range(share.first, share.first + share.count)] == list(range(total))


@pytest.mark.parametrize(
    ("total", "size", "held"), [(1, 3, [0, 0, 0]), (2, 4, [0, 0, 1, 1]), (3, 6, [0, 0, 1, 1, 2, 2])]
)
def test_too_few_are_held_by_several_neighbours(total: int, size: int, held: list[int]) -> None:
    assert [placement.share(total) for placement in placements(size)] == [Share(first, 1, total) for first in held]


@pytest.mark.parametrize(
    ("total", "size", "counts"), [(8, 2, [4, 4]), (9, 2, [5, 4]), (10, 4, [3, 3, 3, 1]), (7, 3, [3, 3, 1])]
)
def test_runs_cover_everything_once_and_the_last_is_shorter(total: int, size: int, counts: list[int]) -> None:
    runs = [placement.run(total) for placement in placements(size)]
    assert [run.count for run in runs] == counts
    assert [index for run in runs for index in range(run.first, run.first + run.count)] == list(range(total))
    assert {placement.longest_run(total) for placement in placements(size)} == {counts[0]}


@pytest.mark.parametrize(
    ("total", "size", "unit", "counts"),
    [(16, 4, 1, [4] * 4), (16, 3, 1, [5, 5, 6]), (2, 3, 1, [0, 1, 1]), (20, 2, 8, [8, 12]), (3420, 8, 64, None)],
)
def test_even_parts_cover_everything_once(total: int, size: int, unit: int, counts: list[int] | None) -> None:
    shares = [placement.even(total, unit) for placement in placements(size)]
    assert [index for share in shares for index in range(share.first, share.first + share.count)] == list(range(total))
    assert counts is None or [share.count for share in shares] == counts
    assert all(share.first % unit == 0 and share.total == total for share in shares)
    assert max(share.count for share in shares) - min(share.count for share in shares) < 2 * unit


def test_a_worker_alone_has_everything() -> None:
    placement = Placement(torch.float32, torch.device("cpu"))
    assert placement.share(7) == placement.run(7) == placement.even(7) == whole(7)
    assert whole(7).is_whole
    assert not Share(0, 6, 7).is_whole


def test_shares_of_heads_are_shares_of_their_rows() -> None:
    assert Share(2, 1, 4).times(16) == Share(32, 16, 64)


def test_a_part_is_cut_along_every_dimension() -> None:
    tensor = torch.arange(24).view(4, 6)
    assert cut(tensor, (Share(1, 2, 4), Share(3, 3, 6))).tolist() == [[9, 10, 11], [15, 16, 17]]
    assert cut(tensor[0], (Share(2, 2, 6),)).tolist() == [2, 3]
    assert Target.of_whole(tensor).shape == (4, 6)
    assert Target(tensor[:2], (Share(0, 2, 4), whole(6))).shape == (4, 6)


def test_stacked_tensors_give_a_part_of_each() -> None:
    tensor = torch.arange(36).view(12, 3)
    target = Target(torch.empty(6, 3), (Share(1, 2, 4), whole(3)), stacked=3)
    assert target.shape == (12, 3)
    for single in target.single():
        assert single.shape == (12, 3)
        single.view.copy_(cut(tensor, single.part))
    assert target.view[:, 0].tolist() == [3 * row for row in (1, 2, 5, 6, 9, 10)]
    whole_target = Target.of_whole(tensor)
    assert whole_target.single() == [whole_target]
