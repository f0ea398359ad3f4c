"""What transformers' video processors do unless told otherwise."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.support.media_config import media_config
from tokenmill_server.multimodal.video_options import VideoMethod, VideoOptions, read_video_options


def video_options(method: VideoMethod, **changes: Any) -> VideoOptions:
    """With patches of the processor's own size."""
    with TemporaryDirectory() as folder:
        Path(folder, "video_preprocessor_config.json").write_text('{"do_resize": true}')
        return replace(read_video_options(Path(folder), media_config(method)), **changes)
