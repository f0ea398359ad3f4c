"""Ranges of memory: none overlaps another, none is lost, neighbours become one."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill_engine.ipc.arena import GRAIN_BYTES, Arena, rounded


@given(st.integers(0, 30), st.lists(st.tuples(st.integers(0, 8 * GRAIN_BYTES), st.integers(0, 9)), max_size=60))
def test_taken_and_free_ranges_cover_everything_once(num_grains: int, steps: list[tuple[int, int]]) -> None:
    """Each step takes a range or gives one back."""
    arena = Arena(num_grains * GRAIN_BYTES + 17)
    taken: list[tuple[int, int]] = []
    for num_bytes, choice in steps:
        if choice < 4 and taken:
            arena.give_back(*taken.pop(choice % len(taken)))
        else:
            free = arena.free_ranges()
            start = arena.take(num_bytes)
            fits = [(size, begin) for begin, size in free if size >= rounded(num_bytes)]
            assert start == (min(fits)[1] if fits else None)
            if start is not None:
                taken.append((start, num_bytes))
        covered = sorted([*arena.free_ranges(), *((start, rounded(size)) for start, size in taken)])
        end = 0
        for start, size in covered:
            assert start == end
            end += size
        assert end == arena.capacity == num_grains * GRAIN_BYTES
        free = arena.free_ranges()
        assert all(one + size < other for (one, size), (other, _) in itertools.pairwise(free))
        assert arena.num_free == sum(size for _, size in free)


@pytest.mark.parametrize(("num_bytes", "expected"), [(0, 1), (1, 1), (GRAIN_BYTES, 1), (GRAIN_BYTES + 1, 2)])
def test_ranges_are_whole_grains(num_bytes: int, expected: int) -> None:
    assert rounded(num_bytes) == expected * GRAIN_BYTES


def test_one_without_a_grain_has_nothing() -> None:
    assert Arena(GRAIN_BYTES - 1).take(1) is None
