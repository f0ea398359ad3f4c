"""The rows of the flag table about videos, and about how media are read and prepared."""

import json
import math
from collections.abc import Callable
from typing import Any, TypeVar

from tokenmill_server.flags.flag import Arity, EnvAlias, Flag, Group
from tokenmill_server.flags.parsers import boolean, integer, number
from tokenmill_server.multimodal.media_kwargs import media_io_kwargs, processor_kwargs
from tokenmill_server.multimodal.processor_kwargs import ProcessorKwargs
from tokenmill_server.multimodal.settings import MediaSettings
from tokenmill_server.multimodal.video_reading import VideoReading

T = TypeVar("T")

_DEFAULTS = MediaSettings()


def _json(kind: type[T], parse: Callable[[object], T], example: str) -> Callable[[Any], T]:
    """A parser of JSON, or of the mapping itself in Python and in config files. What was read before, which is of
    `kind`, stays as it is."""

    def parsed(value: Any) -> T:
        if isinstance(value, kind):
            return value
        if isinstance(value, str):
            try:
                value = {} if value.lower() == "none" else json.loads(value)
            except ValueError:
                raise ValueError(f"an object such as {example}") from None
        try:
            return parse({} if value is None else value)
        except ValueError as error:
            raise ValueError(f"an object such as {example}: {error}") from None

    return parsed


VIDEO = (
    Flag(
        "media-io-kwargs",
        Group.MULTIMODAL,
        _json(VideoReading, media_io_kwargs, '{"video": {"num_frames": 16}}'),
        None,
        'How videos are read, as JSON: {"video": {"num_frames": N, "fps": F}}, the fewer frames of the two, evenly '
        "spread; -1 for all. Default: 32 frames",
        "media.video_reading",
        metavar="JSON",
    ),
    Flag(
        "mm-processor-kwargs",
        Group.MULTIMODAL,
        _json(ProcessorKwargs, processor_kwargs, '{"max_pixels": 602112}'),
        None,
        "What the model's own processors are told, as JSON: min_pixels, max_pixels, size, and for videos fps, "
        "num_frames, min_frames, max_frames, do_sample_frames, cap_pixels_per_frame. Default: what its files say",
        "media.processor_kwargs",
        metavar="JSON",
    ),
    Flag(
        "trust-request-mm-kwargs",
        Group.MULTIMODAL,
        boolean,
        False,
        "Requests may have media_io_kwargs and mm_processor_kwargs of their own",
        "media.trusts_requests",
        arity=Arity.SWITCH,
    ),
    Flag(
        "video-fetch-timeout",
        Group.MULTIMODAL,
        number(0, math.inf, exclude_minimum=True),
        _DEFAULTS.video_fetch_timeout_s,
        "Seconds that fetching a video may take, redirects included",
        "media.video_fetch_timeout_s",
        metavar="SECONDS",
        env=(EnvAlias("VLLM_VIDEO_FETCH_TIMEOUT"),),
    ),
    Flag(
        "max-video-pixels",
        Group.MULTIMODAL,
        integer(1, _DEFAULTS.max_pixels),
        _DEFAULTS.max_video_pixels,
        "Most pixels of a frame of a video, known before it is decoded",
        "media.max_video_pixels",
        metavar="N",
    ),
    Flag(
        "max-video-frames",
        Group.MULTIMODAL,
        integer(1),
        _DEFAULTS.max_video_frames,
        "Most frames of a video that are looked at",
        "media.max_video_frames",
        metavar="N",
    ),
    Flag(
        "max-video-duration",
        Group.MULTIMODAL,
        number(0, math.inf, exclude_minimum=True),
        _DEFAULTS.max_video_duration_s,
        "Longest video, in seconds",
        "media.max_video_duration_s",
        metavar="SECONDS",
    ),
    Flag(
        "video-decode-timeout",
        Group.MULTIMODAL,
        number(0, 3600, exclude_minimum=True),
        _DEFAULTS.video_decode_timeout_s,
        "Seconds that decoding a video may take",
        "media.video_decode_timeout_s",
        metavar="SECONDS",
    ),
)
