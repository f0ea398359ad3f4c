"""Positions of requests with images in slots: however steps are cut, those of the whole prompt and what follows."""

import numpy as np
import pytest

from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.mrope import GridSpan, mrope_positions
from tokenmill_engine.outputs import MediaPlace, SlotStart
from tokenmill_engine.worker.slot_positions import SlotPositions

IMAGES = (MediaPlace(3, 6, (1, 4, 6)), MediaPlace(11, 4, (1, 4, 4)))
NUM_PROMPT, NUM_TOTAL = 18, 25


def start(slot: int, media: tuple[MediaPlace, ...]) -> SlotStart:
    return SlotStart(slot, slot, np.zeros(NUM_PROMPT, np.int32), NUM_PROMPT, 0, ([],), SamplingParams(), (), media)


def expected(media: tuple[MediaPlace, ...]) -> np.ndarray:  # type: ignore[type-arg]
    images = [GridSpan(place.offset, place.grid) for place in media if place.grid is not None]
    known, delta = mrope_positions(NUM_PROMPT, images, 2)
    later = np.tile(np.arange(NUM_PROMPT, NUM_TOTAL) + delta, (3, 1))
    return np.concatenate([known, later], axis=1)


def turn(positions: SlotPositions, *rows: tuple[int, int, int]) -> np.ndarray:  # type: ignore[type-arg]
    """Of rows (slot, first token, end), [3, num_tokens]."""
    indexes = np.concatenate([np.arange(first, end, dtype=np.int32) for _, first, end in rows])
    query_start = np.cumsum([0, *(end - first for _, first, end in rows)]).astype(np.int32)
    turned = positions.turn(np.array([slot for slot, _, _ in rows], np.int32), indexes, query_start)
    assert turned.dtype == np.int32
    return np.broadcast_to(turned, (3, turned.shape[-1]))


@pytest.mark.parametrize("size", [1, 2, 5, 25])
def test_chunks_have_the_positions_of_the_whole(size: int) -> None:
    positions = SlotPositions(4, merge_size=2)
    positions.start([start(2, IMAGES), start(1, ())])
    for first in range(0, NUM_TOTAL, size):
        end = min(first + size, NUM_TOTAL)
        turned = turn(positions, (1, first, end), (2, first, end))
        assert (turned[:, : end - first] == expected(())[:, first:end]).all()
        assert (turned[:, end - first :] == expected(IMAGES)[:, first:end]).all()


def test_one_position_does_where_all_three_are_the_same() -> None:
    positions = SlotPositions(4, merge_size=2)
    positions.start([start(2, IMAGES)])
    decodes = positions.turn(np.array([1, 2], np.int32), np.array([7, 20], np.int32), np.array([0, 1, 2], np.int32))
    assert decodes.tolist() == [7, int(expected(IMAGES)[0, 20])]


def test_videos_take_as_many_positions_as_they_are_long() -> None:
    video = MediaPlace(3, 6, (3, 4, 2), seconds_per_step=2.0)
    positions = SlotPositions(4, merge_size=2, tokens_per_second=1.5)
    positions.start([start(2, (MediaPlace(0, 2, (1, 4, 2)), video)), start(1, (video,))])
    turned = turn(positions, (2, 0, 12))
    assert turned[0].tolist() == [0, 0, 2, 3, 3, 6, 6, 9, 9, 10, 11, 12]
    assert turned[1].tolist() == [0, 1, 2, 3, 4, 3, 4, 3, 4, 10, 11, 12]
    assert turn(positions, (1, 20, 21)).tolist() == [[20 + 1]] * 3


def test_nothing_is_left_of_who_had_the_slot_before() -> None:
    positions = SlotPositions(4, merge_size=2)
    positions.start([start(2, IMAGES)])
    positions.start([start(2, ())])
    assert (turn(positions, (2, 0, NUM_TOTAL)) == np.arange(NUM_TOTAL)).all()
