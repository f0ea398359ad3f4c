"""Videos that a Python program hands over as frames: nothing is decoded. What becomes of them is the same as of a file
with these frames.

Blocks while frames are resized: call it in a thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from PIL import Image

from tokenmill_server.multimodal.errors import MediaError
from tokenmill_server.multimodal.image_turns import alone_with
from tokenmill_server.multimodal.settings import MediaSettings
from tokenmill_server.multimodal.video_process import FramePlan, Frames, VideoFacts

DEFAULT_FPS = 24.0
"""Of frames of which nothing is known, as in transformers."""

Frame = Image.Image | NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class GivenVideo:
    """Frames, and where in a video they stand."""

    frames: Sequence[Frame]
    """Images of Pillow's, or uint8 [height, width, 3]; at least one, all of one size."""
    fps: float
    """Frames per second of the video that they are from."""
    num_frames: int
    """Of that video."""
    chosen: tuple[int, ...] | None = None
    """The numbers of the frames in it, ascending: all of them are looked at. None: they are all there are, and the
    model's own processor may choose among them."""


def resize_frames(video: GivenVideo, settings: MediaSettings, choose: Callable[[VideoFacts], FramePlan]) -> Frames:
    """The frames that `choose` wants. Raises MediaError for frames that are too large or cannot be read, and what
    `choose` does."""
    first = video.frames[0]
    width, height = first.size if isinstance(first, Image.Image) else first.shape[1::-1]
    if width * height > settings.max_video_pixels:
        raise MediaError(
            f"the video has frames of {width} x {height} pixels, more than the {settings.max_video_pixels} that "
            "--max-video-pixels allows"
        )
    plan = choose(VideoFacts(width, height, video.num_frames, video.fps))
    places = {number: place for place, number in enumerate(video.chosen or range(len(video.frames)))}
    size, resample = (plan.width, plan.height), Image.Resampling(plan.resample)
    pixels = np.empty((len(plan.indices), plan.height, plan.width, 3), np.uint8)
    hasher = blake3()
    for row, number in enumerate(plan.indices):
        image = _image(video.frames[places[number]])
        hasher.update(f"{image.width}x{image.height};".encode())
        hasher.update(image.tobytes())
        pixels[row] = np.asarray(image if image.size == size else image.resize(size, resample))
    return Frames(pixels, hasher.digest())


def _image(frame: Frame) -> Image.Image:
    """In RGB, and decoded."""
    if not isinstance(frame, Image.Image):
        return Image.fromarray(frame)
    try:
        with alone_with(frame):
            frame.load()
            return frame if frame.mode == "RGB" else frame.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise MediaError(f"a frame of the video cannot be read: {error}") from error
