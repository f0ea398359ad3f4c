"""From the frames of a video to what a vision encoder takes: the arithmetic of transformers' video processors, with
numpy and Pillow alone.

Those need torchvision, which would bring torch into the API server. Sizes, values and the order of patches are theirs
exactly; a resized pixel may differ from torchvision's by one or two, as Pillow rounds elsewhere.
"""

import math
from dataclasses import dataclass

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from tokenmill_server.multimodal.errors import MediaError
from tokenmill_server.multimodal.processor import MAX_ASPECT_RATIO
from tokenmill_server.multimodal.video_options import VideoOptions
from tokenmill_server.multimodal.video_process import FramePlan, Frames, VideoFacts
from tokenmill_server.multimodal.video_sampling import Sampling, sample_frames, seconds_between_steps, timestamps

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float32]
Grid = tuple[int, int, int]

_BUDGET_SHARE = 0.9
_FLOOR_SHARE = 1.05
"""With `caps_pixels`: of the tokens that a video may have, and of the smallest frame."""


@dataclass(frozen=True, slots=True)
class VideoPlan:
    """What will become of a video, before it is decoded."""

    frames: FramePlan
    grid: Grid
    """As in `MediaItem`."""
    num_tokens: int
    """Rows of the encoder's output."""
    seconds_per_step: float
    """Between patches in time."""
    timestamps: tuple[float, ...]
    """Seconds from the start, of each patch in time."""


def plan_video(facts: VideoFacts, sampling: Sampling, max_frames: int) -> VideoPlan:
    """Chooses frames and their size. Raises MediaError for what the model does not take."""
    options = sampling.options
    indices = sample_frames(facts, sampling, max_frames)
    if options.views is not None:
        height = width = options.views.view_size
        num_tokens = options.views.num_video_rows(len(indices))
    else:
        height, width = frame_size(facts.height, facts.width, len(indices), options)
    steps = -(-len(indices) // options.temporal_patch_size)
    grid = (steps, height // options.patch_size, width // options.patch_size)
    if options.views is None:
        num_tokens = math.prod(grid) // options.merge_size**2
    return VideoPlan(
        FramePlan(indices, height, width, options.resample),
        grid,
        num_tokens,
        seconds_between_steps(facts, indices, options),
        timestamps(facts, indices, options),
    )


def frame_size(height: int, width: int, num_frames: int, options: VideoOptions) -> tuple[int, int]:
    """(height, width) that the frames are resized to, in whole squares of merged patches.

    Raises MediaError for proportions that the model does not take.
    """
    factor, least, most = options.factor, options.min_pixels, _max_pixels(num_frames, options)
    counted = 1
    if options.method == "qwen3_vl":  # pixels of all frames count together
        counted = num_frames
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise MediaError(
            f"the video has frames of {width} x {height} pixels; one side may be at most {MAX_ASPECT_RATIO} times "
            "the other"
        )
    step = options.temporal_patch_size
    rounded = counted if counted == 1 else round(counted / step) * step
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rounded * rows * columns > most:
        shrink = math.sqrt((counted * height * width) / most)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif rounded * rows * columns < least:
        grow = math.sqrt(least / (counted * height * width))
        rows, columns = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return rows, columns


def _max_pixels(num_frames: int, options: VideoOptions) -> int:
    if not options.caps_pixels:
        return options.max_pixels
    square, floor = options.factor**2, int(options.min_pixels * _FLOOR_SHARE)
    if options.method == "qwen2_vl":
        total = int(options.max_video_tokens * square * _BUDGET_SHARE)
        return max(min(options.max_pixels, total * options.temporal_patch_size // num_frames), floor)
    per_frame = max(min(options.max_video_tokens * square, options.max_pixels // num_frames), floor)
    return per_frame * num_frames


def pack_frames(pixels: Pixels, options: VideoOptions) -> Pixels:
    """Frames [num_frames, height, width, 3] as the encoder takes them: [num_frames, 3, height, width] if each is a
    view, else in patches."""
    return _patches(pixels, options) if options.views is None else pixels.transpose(0, 3, 1, 2)


def _patches(pixels: Pixels, options: VideoOptions) -> Pixels:
    """[num_patches, channels * temporal_patch_size * patch_size^2] of frames [num_frames, height, width, 3]: patch by
    patch in time, then the patches that are merged behind each other; within a patch channel, time, row, column."""
    step, size, merge = options.temporal_patch_size, options.patch_size, options.merge_size
    missing = -len(pixels) % step
    if missing:
        pixels = np.concatenate([pixels, np.repeat(pixels[-1:], missing, axis=0)])
    steps, rows, columns = len(pixels) // step, pixels.shape[1] // size, pixels.shape[2] // size
    blocks = pixels.reshape(steps, step, rows // merge, merge, size, columns // merge, merge, size, 3)
    blocks = blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return blocks.reshape(steps * rows * columns, 3 * step * size * size)


def value_table(options: VideoOptions) -> Floats:
    """[3, 256]: what each value of each channel becomes. Rescaling and normalizing are one step in single precision, as
    in transformers' processors of this kind."""
    values = np.tile(np.arange(256, dtype=np.float32), (3, 1))
    if options.mean is None or options.std is None:
        return values if options.rescale_factor is None else values * np.float32(options.rescale_factor)
    mean, std = (np.array(each, np.float32)[:, None] for each in (options.mean, options.std))
    if options.rescale_factor is not None:
        mean, std = (each * np.float32(1.0 / options.rescale_factor) for each in (mean, std))
    return (values - mean) / std


def video_key(plan: VideoPlan, frames: Frames, options: str) -> bytes:
    """Key of a video as a whole: of its frames as they were decoded, and of everything that changes what becomes of
    them, the time between them included."""
    chosen = plan.frames
    hasher = blake3(frames.digest)
    head = f"video {len(chosen.indices)} frames {chosen.width}x{chosen.height} {plan.grid} {plan.seconds_per_step!r} "
    hasher.update(f"{head}{chosen.indices} {len(options)}:{options};".encode())
    return hasher.digest()


def group_key(patches: Pixels, grid: Grid, options: str) -> bytes:
    """Key of one patch in time, where each is encoded by itself: of what the encoder sees."""
    hasher = blake3(f"video group {grid} {patches.shape} {len(options)}:{options};".encode())
    hasher.update(np.ascontiguousarray(patches).reshape(-1).data)
    return hasher.digest()
