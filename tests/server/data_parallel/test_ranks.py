"""Ranks in words."""

from collections.abc import Sequence

import pytest

from tokenmill_server.data_parallel.ranks import phrase, without


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        (range(2, 4), "ranks 2 to 3"),
        ([0, 1, 2, 3], "ranks 0 to 3"),
        ([0, 2], "ranks 0 and 2"),
        ([0, 2, 3, 7], "ranks 0, 2, 3 and 7"),
    ],
)
def test_phrase(ranks: Sequence[int], text: str) -> None:
    assert phrase(ranks) == text


def test_without() -> None:
    assert without(range(6), range(2), [4]) == [2, 3, 5]
    assert without(range(2), range(2)) == []
