"""Which frames are chosen, against transformers and the rules of vLLM."""

from dataclasses import replace
from itertools import product

import pytest
from transformers import Qwen3VLProcessor

from tests.support import video_oracle
from tests.support.video_options import video_options
from tokenmill_server.multimodal.errors import MediaError
from tokenmill_server.multimodal.video_options import VideoMethod, VideoOptions
from tokenmill_server.multimodal.video_process import VideoFacts
from tokenmill_server.multimodal.video_reading import VideoReading
from tokenmill_server.multimodal.video_sampling import (
    Sampling,
    read_indices,
    sample_frames,
    seconds_between_steps,
    timestamps,
)


def facts(num_frames: int, fps: float = 10.0) -> VideoFacts:
    return VideoFacts(64, 48, num_frames, fps)


def chosen(video: VideoFacts, options: VideoOptions, reading: VideoReading | None = None, **fields: bool) -> list[int]:
    return list(sample_frames(video, Sampling(reading or VideoReading(), options, **fields), 10_000))


@pytest.mark.parametrize(
    ("reading", "wanted"),
    [
        (VideoReading(), list(range(20))),
        (VideoReading(4), [0, 6, 12, 19]),
        (VideoReading(-1), list(range(20))),
        (VideoReading(-1, 2.0), [0, 6, 12, 19]),
        (VideoReading(3, 5.0), [0, 9, 19]),
        (VideoReading(1), [0]),
        (VideoReading(-1, 0.1), [0]),
        (VideoReading(500), list(range(20))),
    ],
)
def test_the_reader(reading: VideoReading, wanted: list[int]) -> None:
    assert list(read_indices(facts(20), reading)) == wanted


@pytest.mark.parametrize("method", ["qwen2_vl", "qwen3_vl"])
def test_the_processor_chooses_as_transformers_does(method: VideoMethod) -> None:
    num_compared = 0
    for total, fps in product((*range(2, 60), 100, 999, 18001), (5, 23.976, 29.97, 60)):
        for number, rate in ((None, 2.0), (None, 0.5), (None, 7.0), (4, None), (8, None), (32, None)):
            options = replace(video_options(method), samples=True, num_frames=number, fps=rate)
            try:
                wanted = video_oracle.sampled(facts(total, fps), options)
            except (ValueError, ZeroDivisionError, RuntimeError):  # more than there are
                assert 1 <= len(chosen(facts(total, fps), options, is_stated=True)) <= max(2, total)
                continue
            wanted = [min(index, total - 1) for index in wanted]  # rounding may name one behind the last
            got = chosen(facts(total, fps), options, is_stated=True)
            assert got == wanted + wanted[-1:] * (2 - len(wanted)), (total, fps, number, rate)
            num_compared += 1
    assert num_compared > 500


def test_who_chooses() -> None:
    """The reader first; the processor where the reader leaves all, or a user said how it is to choose."""
    options = video_options("qwen3_vl")
    assert len(chosen(facts(100), options)) == 32
    assert chosen(facts(20), options) == [0, 6, 13, 19]
    assert len(chosen(facts(100), options, VideoReading(-1))) == 20
    assert len(chosen(facts(100), options, is_stated=True)) == 20
    assert len(chosen(facts(20), replace(options, samples=False))) == 20
    assert len(chosen(facts(20), video_options("qwen2_vl"))) == 20


def test_a_patch_in_time_is_full() -> None:
    assert chosen(facts(1), video_options("qwen2_vl")) == [0, 0]
    assert chosen(facts(1), video_options("qwen3_vl")) == [0, 0]
    assert chosen(facts(9), video_options("qwen2_vl"), VideoReading(1)) == [0, 0]


def test_most_frames() -> None:
    sampling = Sampling(VideoReading(-1), video_options("qwen2_vl"))
    assert len(sample_frames(facts(30), sampling, 30)) == 30
    with pytest.raises(MediaError, match=r"31 frames .* more than the 30 that --max-video-frames allows"):
        sample_frames(facts(31), sampling, 30)


def test_times() -> None:
    options = video_options("qwen3_vl")
    assert timestamps(facts(20), (0, 6, 13, 19), options) == pytest.approx((0.3, 1.6))
    assert timestamps(facts(20), (0, 6, 13), options) == pytest.approx((0.3, 1.3))
    assert seconds_between_steps(facts(20), (0, 6, 13, 19), options) == pytest.approx(1.0)


def test_times_are_those_of_transformers() -> None:
    options = video_options("qwen3_vl")
    for indices in ((0, 6, 13, 19), (0, 6, 13), (5, 5), tuple(range(0, 90, 7))):
        wanted = Qwen3VLProcessor._calculate_timestamps(None, list(indices), 23.976, options.temporal_patch_size)
        assert list(timestamps(facts(100, 23.976), indices, options)) == wanted
