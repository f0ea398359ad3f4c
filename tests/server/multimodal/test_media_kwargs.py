"""What users may say about how media are read and prepared."""

import re
from dataclasses import replace
from typing import Any

import pytest

from tests.support.video_options import video_options
from tokenmill_server.multimodal.media_kwargs import media_io_kwargs, processor_kwargs
from tokenmill_server.multimodal.processor_kwargs import ProcessorKwargs
from tokenmill_server.multimodal.video_reading import VideoReading


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({}, VideoReading()),
        ({"video": {}}, VideoReading()),
        ({"video": None, "image": {}}, VideoReading()),
        ({"video": {"num_frames": 8}}, VideoReading(8)),
        ({"video": {"num_frames": -1, "fps": 2}}, VideoReading(-1, 2.0)),
        ({"video": {"fps": -1}}, VideoReading()),
    ],
)
def test_how_videos_are_read(said: Any, wanted: VideoReading) -> None:
    assert media_io_kwargs(said) == wanted


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([], "must be an object"),
        ({"video": [1]}, "video must be an object"),
        ({"video": {"num_frames": 0}}, "video.num_frames must be a whole number above 0"),
        ({"video": {"num_frames": 2.5}}, "video.num_frames must be"),
        ({"video": {"num_frames": True}}, "video.num_frames must be"),
        ({"video": {"fps": float("nan")}}, "video.fps must be"),
        ({"video": {"backend": "x"}}, "video.backend is not known; known are num_frames and fps"),
        ({"image": {"mode": "L"}}, "'image' has nothing to set"),
    ],
)
def test_what_cannot_be_said_of_reading(said: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        media_io_kwargs(said)


def test_what_the_helper_of_qwen_says_of_images_alone() -> None:
    assert processor_kwargs({"do_sample_frames": False, "fps": []}) == ProcessorKwargs(do_sample_frames=False)
    with pytest.raises(ValueError, match=re.escape("fps must be a number above 0, not [2.0]")):
        processor_kwargs({"fps": [2.0]})


def test_what_processors_are_told() -> None:
    assert processor_kwargs({}) == ProcessorKwargs()
    assert processor_kwargs({"fps": None}) == ProcessorKwargs()
    said = processor_kwargs({"min_pixels": 4, "size": {"longest_edge": 9}, "fps": 2, "do_sample_frames": True})
    assert said == ProcessorKwargs(min_pixels=4, max_pixels=9, fps=2.0, do_sample_frames=True)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("x", "must be an object"),
        ({"min_pixels": 0}, "min_pixels must be a whole number above 0, not 0"),
        ({"max_pixels": "9"}, "max_pixels must be"),
        ({"size": 3}, "size must be an object"),
        ({"size": {"height": 3}}, "size has shortest_edge and longest_edge"),
        ({"fps": -1}, "fps must be"),
        ({"do_sample_frames": 1}, "do_sample_frames is true or false"),
        ({"fps": 1, "num_frames": 2}, "exclude each other"),
        ({"min_pixels": 9000, "max_pixels": 1000}, "min_pixels 9000 is more than max_pixels 1000"),
        ({"size": {"shortest_edge": 9, "longest_edge": 8}}, "more than max_pixels 8"),
        ({"fps": 1, "do_sample_frames": False}, "do_sample_frames is false, but"),
        ({"num_crops": 4}, "'num_crops' is not known; known are size, min_pixels"),
    ],
)
def test_what_cannot_be_said_to_processors(said: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        processor_kwargs(said)


def test_a_request_counts_more_than_the_flag() -> None:
    flag = ProcessorKwargs(min_pixels=4, max_pixels=9, num_frames=3)
    assert ProcessorKwargs().over(flag) == flag
    assert ProcessorKwargs(max_pixels=7).over(flag) == replace(flag, max_pixels=7)
    assert ProcessorKwargs(fps=2.0).over(flag) == ProcessorKwargs(min_pixels=4, max_pixels=9, fps=2.0)


def test_all_that_is_said_changes_the_options() -> None:
    options = video_options("qwen3_vl")
    for said in (
        ProcessorKwargs(min_pixels=4),
        ProcessorKwargs(max_pixels=9),
        ProcessorKwargs(fps=7.0),
        ProcessorKwargs(num_frames=8),
        ProcessorKwargs(min_frames=7),
        ProcessorKwargs(max_frames=8),
        ProcessorKwargs(do_sample_frames=False),
        ProcessorKwargs(cap_pixels_per_frame=True),
    ):
        assert options.with_kwargs(said).text() != options.text()
    assert options.with_kwargs(ProcessorKwargs()) == options
    own = video_options("qwen2_vl")
    assert own.with_kwargs(ProcessorKwargs(fps=1.0)).samples
    assert own.with_kwargs(ProcessorKwargs(do_sample_frames=True)).text() != own.text()
