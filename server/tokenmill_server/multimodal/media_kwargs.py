"""What users may say about how media are read and prepared: `--media-io-kwargs` and `--mm-processor-kwargs`, and the
fields of requests with these names.

Whatever is said changes the result, or is refused: names that nothing here knows are errors.
"""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from tokenmill_server.multimodal.processor_kwargs import ProcessorKwargs
from tokenmill_server.multimodal.video_reading import VideoReading
from tokenmill_server.processing.shown import shown

_SIZE_NAMES = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}


def processor_kwargs(value: object) -> ProcessorKwargs:
    """From the mapping that a user wrote. Raises ValueError naming what is wrong in it."""
    said: dict[str, Any] = {}
    for name, each in _mapping(value, "mm_processor_kwargs").items():
        if each is None or (name == "fps" and each == []):  # the second is what Qwen's helper says of images alone
            continue
        if name == "size":
            for key, number in _mapping(each, "size").items():
                if key not in _SIZE_NAMES:
                    raise ValueError(f"size has shortest_edge and longest_edge, in pixels; not {shown(key)}")
                said[_SIZE_NAMES[key]] = _count(number, f"size.{key}")
        elif name in ("do_sample_frames", "cap_pixels_per_frame"):
            if not isinstance(each, bool):
                raise ValueError(f"{name} is true or false, not {shown(each)}")
            said[name] = each
        elif name == "fps":
            said[name] = _rate(each, name)
        elif name in {field.name for field in fields(ProcessorKwargs)}:
            said[name] = _count(each, name)
        else:
            known = ", ".join(["size", *(field.name for field in fields(ProcessorKwargs))])
            raise ValueError(f"{shown(name)} is not known; known are {known}")
    if said.get("fps") is not None and said.get("num_frames") is not None:
        raise ValueError("fps and num_frames exclude each other")
    if said.get("do_sample_frames") is False and (said.get("fps") or said.get("num_frames")):
        raise ValueError("do_sample_frames is false, but fps or num_frames say how to sample")
    if said.get("max_pixels", math.inf) < said.get("min_pixels", 0):
        raise ValueError(f"min_pixels {said['min_pixels']} is more than max_pixels {said['max_pixels']}")
    return ProcessorKwargs(**said)


def media_io_kwargs(value: object) -> VideoReading:
    """From the mapping that a user wrote. Raises ValueError naming what is wrong in it."""
    given = _mapping(value, "media_io_kwargs")
    for name in given.keys() - {"video"}:
        if given[name]:
            raise ValueError(f"{shown(name)} has nothing to set; only video has: num_frames and fps")
    said: dict[str, Any] = {}
    for name, each in _mapping(given.get("video") or {}, "video").items():
        if name == "num_frames":
            said[name] = -1 if each == -1 and not isinstance(each, bool) else _count(each, "video.num_frames")
        elif name == "fps":
            said[name] = -1.0 if each == -1 and not isinstance(each, bool) else _rate(each, "video.fps")
        else:
            raise ValueError(f"video.{name} is not known; known are num_frames and fps")
    return VideoReading(**said)


def _mapping(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be an object, not {shown(value)}")
    return value


def _count(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise ValueError(f"{name} must be a whole number above 0, not {shown(value)}")
    return value


def _rate(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a number above 0, not {shown(value)}")
    return float(value)
