"""Which frames of a video are looked at.

Twice something may choose: the reader (`--media-io-kwargs`), so many frames evenly spread over the video, as vLLM does;
and, where the reader leaves all frames, or a request says how, the model's own processor, as transformers does.
"""

import math
from dataclasses import dataclass

import numpy as np

from tokenmill_server.multimodal.errors import MediaError
from tokenmill_server.multimodal.video_options import VideoOptions
from tokenmill_server.multimodal.video_process import VideoFacts
from tokenmill_server.multimodal.video_reading import VideoReading


@dataclass(frozen=True, slots=True)
class Sampling:
    """Everything that decides which frames are chosen."""

    reading: VideoReading
    options: VideoOptions
    is_stated: bool = False
    """Whether a user said how the processor is to choose: then the reader does not choose before it."""
    chosen: tuple[int, ...] | None = None
    """The frames that somebody chose before: nothing else may choose."""


def sample_frames(facts: VideoFacts, sampling: Sampling, max_frames: int) -> tuple[int, ...]:
    """The numbers of the frames, ascending; at least a patch in time of them, the last one again if need be.

    Raises MediaError for more than `max_frames`.
    """
    indices = _chosen(facts, sampling)
    if len(indices) > max_frames:
        raise MediaError(
            f"{len(indices)} frames of the video would be looked at, more than the {max_frames} that "
            "--max-video-frames allows; ask for fewer"
        )
    missing = sampling.options.temporal_patch_size - len(indices)
    return indices + indices[-1:] * max(0, missing)


def _chosen(facts: VideoFacts, sampling: Sampling) -> tuple[int, ...]:
    if sampling.chosen is not None:
        if sampling.is_stated:
            raise MediaError("the frames of the video were chosen already, and mm_processor_kwargs say how to choose")
        return sampling.chosen
    reading = VideoReading(-1, -1.0) if sampling.is_stated else sampling.reading
    indices = read_indices(facts, reading)
    if len(indices) == facts.num_frames and sampling.options.samples:
        choose = _qwen3_vl_indices if sampling.options.method == "qwen3_vl" else _qwen2_vl_indices
        indices = choose(facts, sampling.options)
    return indices


def read_indices(facts: VideoFacts, reading: VideoReading) -> tuple[int, ...]:
    """What the reader chooses."""
    total = count = facts.num_frames
    if reading.num_frames > 0:
        count = min(count, reading.num_frames)
    if reading.fps > 0:
        count = min(count, math.floor(facts.duration_s * reading.fps))
    count = max(1, count)
    if count == total:
        return tuple(range(total))
    return tuple(np.linspace(0, total - 1, count, dtype=int).tolist())


def _qwen2_vl_indices(facts: VideoFacts, options: VideoOptions) -> tuple[int, ...]:
    """A whole number of patches in time, if there are as many frames; all frames if no number is stated."""
    total, step = facts.num_frames, options.temporal_patch_size
    if options.num_frames is not None:
        count = round(options.num_frames / step) * step
    elif options.fps is not None:
        most = math.floor(min(options.max_frames, total) / step) * step
        wanted = min(max(total / facts.fps * options.fps, options.min_frames), most, total)
        count = math.floor(wanted / step) * step
    else:
        return tuple(range(total))
    count = min(max(count, 1), total)
    # In single precision, as transformers computes it, where rounding may add one.
    indices = np.arange(0, total, total / count).astype(np.float32).astype(int)
    return tuple(np.minimum(indices, total - 1).tolist())


def _qwen3_vl_indices(facts: VideoFacts, options: VideoOptions) -> tuple[int, ...]:
    total = facts.num_frames
    if options.num_frames is not None:
        count = options.num_frames
    elif options.fps is not None:
        count = min(max(int(total / facts.fps * options.fps), options.min_frames), options.max_frames, total)
    else:
        count = min(max(total, options.min_frames), options.max_frames, total)
    return tuple(np.linspace(0, total - 1, max(1, count)).round().astype(int).tolist())


def seconds_between_steps(facts: VideoFacts, indices: tuple[int, ...], options: VideoOptions) -> float:
    """Seconds from one patch in time to the next, on average."""
    sampled_fps = len(indices) / facts.num_frames * facts.fps
    return options.temporal_patch_size / sampled_fps


def timestamps(facts: VideoFacts, indices: tuple[int, ...], options: VideoOptions) -> tuple[float, ...]:
    """Seconds from the start of each patch in time: the middle between its first frame and its last."""
    step = options.temporal_patch_size
    padded = indices + indices[-1:] * (-len(indices) % step)
    times = [index / facts.fps for index in padded]
    return tuple((times[start] + times[start + step - 1]) / 2 for start in range(0, len(times), step))
