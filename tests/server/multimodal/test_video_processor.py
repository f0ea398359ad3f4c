"""What becomes of a video's frames, against transformers."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from tests.support import video_oracle
from tests.support.video_options import video_options
from tests.support.videos import moving
from tokenmill_server.multimodal.errors import MediaError
from tokenmill_server.multimodal.video_options import VideoMethod
from tokenmill_server.multimodal.video_process import FramePlan, Frames, VideoFacts
from tokenmill_server.multimodal.video_processor import (
    frame_size,
    group_key,
    pack_frames,
    plan_video,
    value_table,
    video_key,
)
from tokenmill_server.multimodal.video_reading import VideoReading
from tokenmill_server.multimodal.video_sampling import Sampling

METHODS: tuple[VideoMethod, ...] = ("qwen2_vl", "qwen3_vl")


@pytest.mark.parametrize("method", METHODS)
def test_sizes(method: VideoMethod) -> None:
    rng = np.random.default_rng(0)
    for _ in range(500):
        height, width, num_frames = (int(each) for each in rng.integers((8, 8, 2), (1500, 1500, 60)))
        most, least = (int(each) for each in rng.integers((50_000, 1000), (3_000_000, 50_000)))
        options = video_options(method, min_pixels=least, max_pixels=most)
        try:
            wanted = video_oracle.resized_size(height, width, num_frames, options)
        except ValueError:
            with pytest.raises(MediaError, match="at most 200 times"):
                frame_size(height, width, num_frames, options)
            continue
        assert frame_size(height, width, num_frames, options) == wanted
    with pytest.raises(MediaError, match="at most 200 times"):
        frame_size(2000, 9, 2, video_options(method))


@pytest.mark.parametrize("method", METHODS)
def test_many_frames_may_be_told_to_be_smaller(method: VideoMethod) -> None:
    options = video_options(method, caps_pixels=True)
    if method == "qwen2_vl":  # 0.9 of 1280 tokens over 128 patches in time, but never below the smallest frame
        options = replace(options, max_video_tokens=1280, min_pixels=3136)
        assert frame_size(720, 1280, 256, options) == frame_size(720, 1280, 2, replace(options, max_pixels=7056))
    else:  # 768 tokens for a frame
        options = replace(options, max_pixels=10**8)
        rows, columns = frame_size(2000, 2000, 4, options)
        assert rows * columns <= 768 * 32 * 32 < frame_size(2000, 2000, 4, replace(options, caps_pixels=False))[0] ** 2


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_frames", [2, 3, 8])
def test_values_and_their_order(method: VideoMethod, num_frames: int) -> None:
    """Bit for bit, where nothing is resized."""
    options = video_options(method)
    frames = np.stack(moving(num_frames, 3 * options.factor, 2 * options.factor))
    packed = pack_frames(frames, options)
    assert packed.dtype == np.uint8
    channels = np.repeat(np.arange(3), packed.shape[1] // 3)
    np.testing.assert_array_equal(value_table(options)[channels, packed], video_oracle.patches(frames, options))


def test_resizing_differs_by_little() -> None:
    frames = np.stack(moving(4, 240, 320))
    for height, width in ((140, 196), (448, 616)):
        wanted = video_oracle.resized(frames, height, width).astype(int)
        got = np.stack([np.asarray(Image.fromarray(frame).resize((width, height), 3)) for frame in frames])
        assert np.abs(got - wanted).max() <= 2
        assert np.mean(got != wanted) < 0.06


def test_a_plan() -> None:
    sampling = Sampling(VideoReading(5), video_options("qwen2_vl"))
    plan = plan_video(VideoFacts(320, 240, 100, 25.0), sampling, 768)
    assert plan.frames == FramePlan((0, 24, 49, 74, 99), 280, 392, 3)
    assert plan.grid == (3, 20, 28)
    assert plan.num_tokens == 3 * 10 * 14
    assert plan.seconds_per_step == pytest.approx(2 / 1.25)


def test_keys() -> None:
    """Whatever changes what the model sees changes them."""
    options = video_options("qwen2_vl")
    facts = VideoFacts(320, 240, 100, 25.0)
    digest = Frames(np.zeros((0, 0, 0, 3), np.uint8), b"x" * 32)

    def key(facts: VideoFacts, sampling: Sampling, digest: Frames = digest) -> bytes:
        return video_key(plan_video(facts, sampling, 768), digest, sampling.options.text())

    keys = [
        key(facts, Sampling(VideoReading(5), options)),
        key(facts, Sampling(VideoReading(6), options)),
        key(replace(facts, fps=24.0), Sampling(VideoReading(5), options)),
        key(facts, Sampling(VideoReading(5), replace(options, max_pixels=200_000))),
        key(facts, Sampling(VideoReading(5), replace(options, mean=(0.5, 0.5, 0.5)))),
        key(facts, Sampling(VideoReading(5), options), replace(digest, digest=b"y" * 32)),
    ]
    assert len(set(keys)) == len(keys)
    assert key(facts, Sampling(VideoReading(5), options)) == keys[0]
    patches = np.zeros((4, 12), np.uint8)
    groups = [
        group_key(patches, (1, 2, 2), "a"),
        group_key(patches, (1, 4, 1), "a"),
        group_key(patches, (1, 2, 2), "b"),
        group_key(patches + 1, (1, 2, 2), "a"),
    ]
    assert len(set(groups)) == 4
