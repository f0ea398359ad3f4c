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


def test_a_worker_alone_has_everything() -> None:
    placement = Placement(torch.float32, torch.device("cpu"))
    assert placement.share(7) == placement.run(7) == whole(7)
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
