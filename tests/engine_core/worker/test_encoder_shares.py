"""How the images of a step are shared out."""

import itertools
from collections.abc import Sequence
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from tests.support.thread_group import ThreadGroup, on_every_rank, thread_groups
from tokenmill_engine.config.media import EncoderMode
from tokenmill_engine.outputs import EncoderInput
from tokenmill_engine.worker.encoder_shares import EncoderShare, split_evenly


def image(entry: int, grid: tuple[int, int, int] | None) -> EncoderInput:
    return EncoderInput(entry, "image", 4, grid, {})


def loads(costs: list[int], owners: list[int], size: int) -> list[int]:
    return [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(size)]


def test_large_ones_go_first() -> None:
    assert split_evenly([1, 1, 8, 4, 2], 2) == [1, 1, 0, 1, 1]
    assert split_evenly([5, 5, 4, 4, 3, 3], 3) == [0, 1, 2, 2, 0, 1]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=7), st.integers(1, 4), st.integers(0, 10))
def test_nobody_has_much_more_than_with_the_best_split(costs: list[int], size: int, first: int) -> None:
    owners = split_evenly(costs, size, first)
    best = min(max(loads(costs, list(each), size)) for each in itertools.product(range(size), repeat=len(costs)))
    assert set(owners) <= set(range(size))
    assert max(loads(costs, owners, size)) * 3 * size <= best * (4 * size - 1)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=64), st.integers(1, 8))
def test_nobody_has_more_than_an_even_share_and_one_item(costs: list[int], size: int) -> None:
    shares = loads(costs, split_evenly(costs, size), size)
    assert sum(shares) == sum(costs)
    assert max(shares) - min(shares) <= max(costs)


def test_single_images_go_to_one_worker_after_another() -> None:
    share = EncoderShare(thread_groups(3)[0], "data")
    assert [share.keepers([image(entry, (1, 2, 2))]) for entry in range(5)] == [[0], [1], [2], [0], [1]]


def test_all_workers_agree_and_each_image_is_encoded_once() -> None:
    images = [image(7 + index, (1, 2, 2 * size)) for index, size in enumerate((9, 1, 4, 4, 2, 8, 1))]
    shares = [EncoderShare(group, "data") for group in thread_groups(3)]
    keepers = shares[0].keepers(images)
    assert all(share.keepers(images) == keepers for share in shares)
    for keeper in keepers:
        assert sum(share.computes(keeper) for share in shares) == 1
    patches = loads([4 * size for size in (9, 1, 4, 4, 2, 8, 1)], keepers, 3)
    assert max(patches) - min(patches) <= 4


def test_an_encoder_in_parts_has_all_workers_compute_and_one_of_them_keep() -> None:
    shares = [EncoderShare(group, "weights") for group in thread_groups(2)]
    images = [image(entry, None) for entry in range(4)]
    assert [share.keepers(images) for share in shares] == [[0, 1, 0, 1]] * 2
    assert all(share.computes(keeper) for share in shares for keeper in (0, 1))


def test_who_computes_together_needs_all_to_be_able_to() -> None:
    groups = thread_groups(2)
    mine = ([True, True, False], [True, False, True])
    assert on_every_rank(groups, partial(agreed, "weights", mine)) == [[True, False, False]] * 2
    assert on_every_rank(groups, partial(agreed, "data", mine)) == list(mine)
    for group in groups:
        group.calls.clear()
    assert on_every_rank(groups, partial(agreed, "weights", ([True] * 3,) * 2)) == [[True] * 3] * 2
    assert on_every_rank(groups, partial(agreed, "weights", ([], []))) == [[], []]
    # One question for all images, if all is well.
    assert [group.calls for group in groups] == [["agree_min"]] * 2


def agreed(mode: EncoderMode, can: Sequence[list[bool]], group: ThreadGroup) -> list[bool]:
    return EncoderShare(group, mode).agreed(can[group.rank])


def test_images_of_one_size_cost_the_same_and_others_as_many_views_as_they_have() -> None:
    group = thread_groups(2)[0]
    assert EncoderShare(group, "data").keepers([image(entry, None) for entry in range(4)]) == [0, 1, 0, 1]
    small_in_many, large, larger = image(0, (5, 30, 30)), image(1, (2, 900, 900)), image(2, (3, 800, 900))
    views = EncoderShare(group, "data", has_views=True)
    assert views.keepers([large, small_in_many, larger]) == [0, 1, 0]
