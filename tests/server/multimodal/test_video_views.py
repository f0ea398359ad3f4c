"""Videos whose frames are views of one size, as LLaVA-OneVision sees them, against transformers' arithmetic."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import video_oracle
from tests.support.tiny_media_models import LLAVA_IMAGE_SIZE, make_tiny_media_model
from tests.support.videos import moving
from tokenmill_engine.config.media import MediaConfig
from tokenmill_engine.config.model_files import resolve_model
from tokenmill_engine.errors import ConfigError
from tokenmill_server.multimodal.video_options import read_video_options
from tokenmill_server.multimodal.video_process import FramePlan, VideoFacts
from tokenmill_server.multimodal.video_processor import pack_frames, plan_video, value_table
from tokenmill_server.multimodal.video_reading import VideoReading
from tokenmill_server.multimodal.video_sampling import Sampling

SIZE = LLAVA_IMAGE_SIZE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_media_model(tmp_path / "model", "llava_onevision")


def media_of(folder: Path) -> MediaConfig:
    media = resolve_model(str(folder)).media
    assert media is not None
    return media


def test_every_frame_is_a_view(folder: Path) -> None:
    options = read_video_options(folder, media_of(folder))
    plan = plan_video(VideoFacts(320, 240, 100, 25.0), Sampling(VideoReading(5), options), 768)
    assert plan.frames == FramePlan((0, 24, 49, 74, 99), SIZE, SIZE, 3)
    assert plan.grid == (5, SIZE, SIZE)
    assert plan.num_tokens == 5 * 2 * 2 + 1
    frames = np.stack(moving(3, SIZE, SIZE))
    packed = pack_frames(frames, options)
    values = value_table(options)[np.arange(3)[:, None, None], packed]
    np.testing.assert_array_equal(values, video_oracle.normalized(frames, options).numpy())


@pytest.mark.parametrize(
    "change",
    [{"size": {"height": 25, "width": 24}}, {"size": {"shortest_edge": 24}}, {"do_center_crop": True}],
)
def test_frames_of_another_size_are_a_start_error(folder: Path, change: dict[str, Any]) -> None:
    named = {"video_processor_type": "LlavaOnevisionVideoProcessor", "size": {"height": SIZE, "width": SIZE}}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(named))
    assert read_video_options(folder, media_of(folder)).views == media_of(folder).views
    (folder / "video_preprocessor_config.json").write_text(json.dumps(named | change))
    with pytest.raises(ConfigError, match=f"must become {SIZE} x {SIZE} pixels"):
        read_video_options(folder, media_of(folder))


def test_a_processor_of_patches_is_a_start_error(folder: Path) -> None:
    (folder / "video_preprocessor_config.json").write_text('{"video_processor_type": "Qwen2VLVideoProcessor"}')
    with pytest.raises(ConfigError, match="does not fit this model"):
        read_video_options(folder, media_of(folder))
