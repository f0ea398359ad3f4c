"""Plans and answers as bytes: what comes out is what went in, and may be written to."""

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.media_items import make_pixels, with_values
from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.outputs import (
    BlockAppend,
    EncoderInput,
    LogprobRows,
    MediaPlace,
    PlaceholderRows,
    SlotStart,
    StepMedia,
    StepPlan,
    StepResult,
    TokenAppend,
    TokenMasks,
)
from tokenmill_engine.worker.wire import (
    Answer,
    StepFailure,
    decode_answer,
    decode_masks,
    decode_plan,
    encode_answer,
    encode_masks,
    encode_plan,
)

MASKS = TokenMasks(np.array([0, 2], np.int32), np.arange(6, dtype=np.int32).reshape(2, 3))
ROWS = LogprobRows(np.ones((2, 3), np.int32), np.full((2, 3), -0.5, np.float32), np.arange(2, dtype=np.int32))


def full_plan() -> StepPlan:
    """One in which no field has its default."""
    sampling = SamplingParams(temperature=0.5, seed=3, logit_bias={5: 1.5}, bad_words_token_ids=((1, 2), (3,)))
    token_ids = np.arange(70, dtype=np.int32)
    places = (MediaPlace(20, 4, (1, 4, 4)), MediaPlace(30, 4, None))
    start = SlotStart(4, 1 << 60, token_ids, 60, 16, ([1, 2, 3], [7]), sampling, (0, 9), places)
    image = EncoderInput(8, "image", 4, (1, 4, 4), with_values(make_pixels((16, 12))))
    values: dict[str, Any] = {
        "step": 12,
        "slots": np.array([4, 1], np.int32),
        "num_scheduled": np.array([1, 54], np.int32),
        "num_computed": np.array([90, 16], np.int32),
        "samples": np.array([True, False]),
        "num_decodes": 1,
        "starts": [start],
        "appends": [BlockAppend(1, 0, 3, [8, 9]), BlockAppend(1, 1, 2, [])],
        "known": [TokenAppend(1, 71, [5, 6])],
        "media": StepMedia([3], [image], [PlaceholderRows(1, 4, 4, 8, 0)]),
        "masks": MASKS,
        "masks_follow": True,
    }
    return StepPlan(**values)


def same(a: object, b: object) -> bool:
    """Equal in depth, arrays by value and dtype."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())  # type: ignore[attr-defined]
    if dataclasses.is_dataclass(a):
        names = [field.name for field in dataclasses.fields(a)]
        return all(same(getattr(a, name), getattr(b, name)) for name in names)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))  # type: ignore[arg-type]
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)  # type: ignore[attr-defined, index]
    return a == b


@pytest.mark.parametrize("changes", [{}, {"appends": []}, {"starts": []}, {"media": None}])
def test_plans(changes: dict[str, Any]) -> None:
    plan = dataclasses.replace(full_plan(), **changes)
    message, *following = map(bytearray, encode_plan(plan))
    copy = decode_plan(message, iter(following))
    assert same(copy, plan)
    assert not same(copy, dataclasses.replace(plan, num_decodes=0))
    copy.slots[0] = 5
    assert plan.slots[0] == 4


@pytest.mark.parametrize(
    "answer",
    [
        StepResult(
            3, np.array([[5], [-1]], np.int32), np.array([1, 0], np.int32), {0: ROWS}, {1: ROWS}, {1: "no"}, 0.5, (8,)
        ),
        StepFailure(7, "step 3 failed: ValueError: no", 12.5, is_final=True),
    ],
)
def test_answers(answer: Answer) -> None:
    assert same(decode_answer(bytearray(encode_answer(answer))), answer)


@pytest.mark.parametrize("masks", [MASKS, None])
def test_masks(masks: TokenMasks | None) -> None:
    assert same(decode_masks(bytearray(encode_masks(masks))), masks)


def test_pixels_follow_their_plan_and_are_copied_by_nobody() -> None:
    large, small = make_pixels((5000, 12)), make_pixels((16, 12), seed=1)
    view = msgspec.structs.replace(large, data=memoryview(large.data))
    images = [
        EncoderInput(number, "image", 4, (1, 4, 4), with_values(each)) for number, each in enumerate((view, small))
    ]
    plan = dataclasses.replace(full_plan(), media=StepMedia([], images, []))
    message, *following = encode_plan(plan)
    (pixels,) = following
    assert np.frombuffer(pixels, np.uint8).ctypes.data == np.frombuffer(large.data, np.uint8).ctypes.data
    messages = iter([bytearray(pixels), b"the next plan"])
    copy = decode_plan(bytearray(message), messages)
    assert copy.media is not None
    assert [image.tensors["pixel_values"].data for image in copy.media.encode] == [large.data, small.data]
    assert next(messages) == b"the next plan"
