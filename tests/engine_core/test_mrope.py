"""Positions in three dimensions. Equality with transformers: models/test_media_decoder.py."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.media_items import QWEN, WITH_TIME, qwen_item, video_item
from tokenmill_engine.mrope import GridSpan, longest_with, mrope_positions, position_delta


def test_text_alone_counts_on() -> None:
    positions, delta = mrope_positions(5, [], 2)
    assert positions.dtype == np.int32
    assert positions.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert delta == 0


def test_an_image_has_rows_and_columns_and_text_goes_on_behind_the_largest() -> None:
    positions, delta = mrope_positions(10, [GridSpan(2, (1, 4, 6))], 2)
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert delta == -3


def test_frames_differ_in_time() -> None:
    positions, delta = mrope_positions(4, [GridSpan(0, (2, 2, 4))], 2)
    assert positions.tolist() == [[0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1]]
    assert delta == -2


def test_frames_lie_as_far_apart_as_they_say_cut_to_whole_positions() -> None:
    positions, delta = mrope_positions(6, [GridSpan(1, (4, 2, 2), 1.5)], 2)
    assert positions.tolist() == [[0, 1, 2, 4, 5, 6], [0, 1, 1, 1, 1, 6], [0, 1, 1, 1, 1, 6]]
    assert delta == 1


def test_positions_do_not_depend_on_what_follows() -> None:
    images = [GridSpan(3, (1, 6, 2)), GridSpan(6, (1, 4, 4)), GridSpan(15, (1, 2, 8))]
    whole, delta = mrope_positions(25, images, 2)
    assert np.array_equal(mrope_positions(12, images[:2], 2)[0], whole[:, :12])
    assert whole[:, -1].tolist() == [24 + delta] * 3


@pytest.mark.parametrize("images", [[(0, (1, 4, 4)), (3, (1, 2, 2))], [(8, (1, 4, 4))], [(2, (1, 1, 1))]])
def test_images_that_overlap_are_cut_off_or_empty_are_refused(images: list[tuple[int, tuple[int, int, int]]]) -> None:
    with pytest.raises(ValueError, match="overlaps or is cut off"):
        mrope_positions(10, [GridSpan(*image) for image in images], 2)


SPANS = st.tuples(
    st.integers(0, 5),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from((1.0, 0.3, 1.7, 2.0, 33.3)),
)
"""Text before it, steps in time, rows, columns and positions from step to step."""


@given(st.lists(SPANS, max_size=4), st.integers(0, 5))
def test_how_far_positions_go_is_known_without_them(spans: list[tuple[int, int, int, int, float]], rest: int) -> None:
    end, media = 0, []
    for before, time, rows, columns, step in spans:
        media.append(GridSpan(end + before, (time, 2 * rows, 2 * columns), step))
        end += before + time * rows * columns
    positions, delta = mrope_positions(end + rest, media, 2)
    assert position_delta(media, 2) == delta
    assert positions.max(initial=-1) == end + rest + delta - 1


def test_only_videos_that_tell_the_time_need_more_positions_than_tokens() -> None:
    assert longest_with([video_item("a", 0, seconds=5.0)], WITH_TIME, 100) == 100 - (11 - 4)
    assert longest_with([qwen_item("cat", 0, 3, 3)], QWEN, 100) == 100
    assert longest_with([], WITH_TIME, 100) == 100
