"""What comes from a front end with the wrong media fails that request alone, and says why."""

from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.media_items import (
    IMAGE_TOKEN,
    LLAVA,
    QWEN,
    VALUES,
    VIDEO_TOKEN,
    WITH_TIME,
    WITH_VIDEO,
    llava_item,
    make_pixels,
    qwen_item,
    tensor_of,
    video_item,
    with_values,
)
from tokenmill_engine.errors import InvalidRequestError
from tokenmill_engine.media_items import check_media
from tokenmill_engine.messages import AddRequest, MediaItem, MediaTensor, SamplingParams

TENSORS = qwen_item("cat", 2).tensors
PROMPT = np.array([1, 2, *[IMAGE_TOKEN] * 4, 3, *[IMAGE_TOKEN] * 4, 4], dtype=np.int32)


def changed(**fields: Any) -> MediaItem:
    return msgspec.structs.replace(qwen_item("cat", 2), **fields)


def test_what_fits_is_taken() -> None:
    check_media((qwen_item("cat", 2), qwen_item("dog", 7, 1, 4)), PROMPT, QWEN, 4)
    check_media((llava_item("cat", 2), llava_item("cat", 7)), PROMPT, LLAVA, 4)
    check_media((), PROMPT, None, 0)


def test_it_comes_over_the_wire_as_it_was() -> None:
    items = (qwen_item("cat", 2), llava_item("dog", 7), video_item("film", 20, seconds=0.5))
    message = AddRequest(1, "", PROMPT.tobytes(), SamplingParams(), 0.0, media=items)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=AddRequest) == message


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ((changed(kind="video"),), "images only"),
        ((changed(key=b"short"),), "5 bytes"),
        ((changed(offset=1),), "not all its placeholder"),
        ((changed(offset=-4),), "begins at token -4"),
        ((changed(num_tokens=0),), "0 tokens"),
        ((changed(offset=9),), "ends at token 13; the prompt has 12"),
        ((qwen_item("cat", 2), qwen_item("dog", 5)), "begins at token 5"),
        ((qwen_item("cat", 7), qwen_item("dog", 2)), "begins at token 2"),
        ((changed(tensors={}),), "tensors"),
        ((changed(tensors=TENSORS | {"more": make_pixels((1,))}),), "tensors"),
        ((changed(tensors=TENSORS | {"pixel_values": make_pixels((16, 24))}),), r"\(16, 24\), not uint8 \(16, 12\)"),
        ((changed(tensors=TENSORS | {"pixel_values": tensor_of(np.zeros((16, 12), np.float32))}),), "not uint8"),
        ((changed(tensors=TENSORS | {"pixel_values": MediaTensor("uint8", (16, 12), b"1234")}),), "have 4 bytes"),
        ((changed(tensors=TENSORS | {"values": tensor_of(VALUES[:1])}),), r"not float32 \(3, 256\)"),
        ((changed(tensors=TENSORS | {"values": make_pixels((3, 256))}),), "not float32"),
        ((changed(tensors=TENSORS | {"values": MediaTensor("float32", (3, 256), bytes(256))}),), "256 bytes, not 3072"),
        ((changed(grid=None),), "grid is None"),
        ((changed(grid=(1, 3, 4)),), "multiples of 2"),
        ((changed(grid=(-1, -4, 4)),), "grid"),
        ((changed(grid=(1, 4, 8)),), "becomes 8 rows"),
        ((changed(grid=(2, 2, 4)),), "one patch in time"),
        ((changed(seconds_per_step=1.0),), "nothing asks for its seconds"),
        ((llava_item("cat", 2),), "grid"),
    ],
)
def test_what_does_not_fit_is_refused(items: tuple[MediaItem, ...], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refusal:
        check_media(items, PROMPT, QWEN, 4)
    assert refusal.value.param == "media"


def test_llava_takes_one_size() -> None:
    with pytest.raises(InvalidRequestError, match="no grid"):
        check_media((qwen_item("cat", 2),), PROMPT, LLAVA, 4)


def test_a_model_without_eyes_refuses() -> None:
    with pytest.raises(InvalidRequestError, match="text only"):
        check_media((qwen_item("cat", 2),), PROMPT, None, 4)


def test_an_image_larger_than_the_engine_holds_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="takes 4 tokens; this engine holds 3"):
        check_media((qwen_item("cat", 2),), PROMPT, QWEN, 3)


FILM = np.array([1, 2, *[VIDEO_TOKEN] * 4, 3, *[IMAGE_TOKEN] * 4, 4], dtype=np.int32)


def test_a_video_is_taken_by_a_model_that_takes_videos() -> None:
    check_media((video_item("film", 2), qwen_item("cat", 7)), FILM, WITH_VIDEO, 4)
    check_media((video_item("film", 2, seconds=0.25), qwen_item("cat", 7)), FILM, WITH_TIME, 4)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (video_item("film", 7), "not all its placeholder"),
        (video_item("film", 2, seconds=1.0), "nothing asks for its seconds"),
        (msgspec.structs.replace(video_item("film", 2), kind="audio"), "images and videos only"),
        (msgspec.structs.replace(video_item("film", 2), tensors=with_values(make_pixels((16, 12)))), "not uint8 .*24"),
    ],
)
def test_a_video_that_does_not_fit_is_refused(item: MediaItem, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check_media((item,), FILM, WITH_VIDEO, 4)


@pytest.mark.parametrize(
    ("seconds", "message"),
    [(None, "above 0"), (0.0, "above 0"), (float("nan"), "above 0"), (float("inf"), "too long"), (8.0, "too long")],
)
def test_a_video_without_a_time_that_the_positions_hold_is_refused(seconds: float | None, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check_media((video_item("film", 2, seconds=seconds),), FILM, WITH_TIME, 4)


def test_a_video_larger_than_the_engine_holds_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="shorter or smaller video"):
        check_media((video_item("film", 2),), FILM, WITH_VIDEO, 3)
