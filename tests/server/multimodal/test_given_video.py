"""Frames that a program hands over become what a file with these frames does."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from tests.support.video_decoding import SETTINGS, decode
from tests.support.video_options import video_options
from tests.support.videos import decoded, moving, video_file
from tokenmill_server.multimodal.errors import MediaError
from tokenmill_server.multimodal.given_video import GivenVideo, resize_frames
from tokenmill_server.multimodal.video_process import FramePlan, VideoFacts
from tokenmill_server.multimodal.video_reading import VideoReading
from tokenmill_server.multimodal.video_sampling import Sampling, sample_frames

FILE = video_file(moving(12, 48, 64), rate=4)
FRAMES = decoded(FILE)


@pytest.mark.parametrize("size", [(48, 64), (32, 40)])
def test_as_from_a_file(size: tuple[int, int]) -> None:
    told: list[VideoFacts] = []

    def choose(facts: VideoFacts) -> FramePlan:
        told.append(facts)
        return FramePlan((2, 5, 9, 9), *size, resample=3)

    wanted = decode(FILE, choose)
    some = [FRAMES[2], Image.fromarray(FRAMES[5]), FRAMES[9]]
    for video in (
        GivenVideo(FRAMES, 4.0, 12),
        GivenVideo(np.stack(FRAMES), 4.0, 12),  # type: ignore[arg-type]
        GivenVideo(some, 4.0, 12, chosen=(2, 5, 9)),
    ):
        found = resize_frames(video, SETTINGS, choose)
        np.testing.assert_array_equal(found.pixels, wanted.pixels)
        assert found.digest == wanted.digest
    assert told == [VideoFacts(64, 48, 12, 4.0)] * 4


def test_frames_may_have_any_colours() -> None:
    grey = [Image.fromarray(frame).convert("L") for frame in FRAMES]
    found = resize_frames(GivenVideo(grey, 4.0, 12), SETTINGS, lambda _: FramePlan((3,), 48, 64, resample=3))
    np.testing.assert_array_equal(found.pixels[0], np.asarray(grey[3].convert("RGB")))


def test_frames_that_are_too_large() -> None:
    settings = replace(SETTINGS, max_video_pixels=3000)
    with pytest.raises(MediaError, match=r"frames of 64 x 48 pixels, more than the 3000 that --max-video-pixels"):
        resize_frames(GivenVideo(FRAMES, 4.0, 12), settings, lambda _: FramePlan((3,), 48, 64, resample=3))


def test_nothing_chooses_among_chosen_frames() -> None:
    options = video_options("qwen3_vl", samples=True, fps=2.0)
    facts = VideoFacts(64, 48, 100, 10.0)
    sampling = Sampling(VideoReading(2), options, chosen=(1, 5, 50))
    assert sample_frames(facts, sampling, 10) == (1, 5, 50)
    assert sample_frames(facts, replace(sampling, chosen=(7,)), 10) == (7, 7)
    with pytest.raises(MediaError, match=r"3 frames of the video .* more than the 2 that --max-video-frames"):
        sample_frames(facts, sampling, 2)
    with pytest.raises(MediaError, match="chosen already, and mm_processor_kwargs say how to choose"):
        sample_frames(facts, replace(sampling, is_stated=True), 10)
