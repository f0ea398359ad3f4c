"""Images and videos beside a prompt of `LLM.generate`: `multi_modal_data` and `multi_modal_uuids`, as vLLM takes them.

Knows what they may be, and nothing of the prompt. A wrong type is a TypeError with a sentence.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
from PIL import Image

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_server.multimodal.given_video import DEFAULT_FPS, Frame, GivenVideo
from tokenmill_server.multimodal.parts import ImageSource, MediaParts, MediaSource, VideoSource, uuid_of
from tokenmill_server.processing.shown import shown

_KINDS = ("image", "video")
_WITHOUT_EFFECT = frozenset({"duration", "width", "height", "video_backend"})
"""Of a video, which its frames say as well, or which change nothing."""
_FRAMES = "uint8 [frames, height, width, 3], or a list of images of Pillow's or of uint8 [height, width, 3]"


def given_media(data: object, uuids: object, parts: MediaParts, label: str) -> list[MediaSource]:
    """All images in order, then all videos. `label`: the prompt they belong to. `parts` says what the model takes.

    Raises:
        TypeError: something is of another type.
        InvalidRequestError: the model does not take it, or there are not as many uuids.
    """
    given, names = _by_kind(data, f"multi_modal_data of {label}"), _by_kind(uuids, f"multi_modal_uuids of {label}")
    sources: list[MediaSource] = []
    for kind in _KINDS:
        path = f"multi_modal_data[{kind!r}]"
        values = [] if given.get(kind) is None else _listed(kind, given[kind], f"{path} of {label}")
        called = _names(names.get(kind), f"multi_modal_uuids[{kind!r}] of {label}")
        if given.get(kind) is None:
            values = [None] * len(called)
        if called and len(called) != len(values):
            raise InvalidRequestError(
                f"multi_modal_uuids[{kind!r}] of {label} has {len(called)} entries, and {path} {len(values)}", path
            )
        if values and not parts.takes(kind):
            raise parts.refusal(f"{kind}s in multi_modal_data of {label}", path)
        for index, value in enumerate(values):
            place = f"{path}[{index}]"
            sources.append(_source(kind, value, called[index] if called else None, place, label))
    return sources


def _by_kind(value: object, what: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f'{what} must be a dict such as {{"image": ...}}; got {type(value).__name__}')
    unknown = [key for key in value if key not in _KINDS]
    if unknown:
        raise InvalidRequestError(f"{what} has {shown(unknown[0])}; known are image and video", "multi_modal_data")
    return value


def _names(value: object, what: str) -> Sequence[str | None]:
    if value is None:
        return ()
    names = [value] if isinstance(value, str) else value
    if not _is_list(names):
        raise TypeError(f"{what} must be text, or a list of texts and None; got {type(value).__name__}")
    return [uuid_of(name, f"{what}, entry {index}") for index, name in enumerate(names)]


def _listed(kind: str, value: Any, what: str) -> list[Any]:
    """The images or videos of one prompt, of which there may be one without a list."""
    is_one, most_dimensions = (_is_frame, 4) if kind == "image" else (_is_video, 5)
    if is_one(value):
        return [value]
    if (isinstance(value, np.ndarray) and value.ndim == most_dimensions) or _is_list(value):
        return list(value)
    raise _wrong(kind, value, what)


def _source(kind: str, value: Any, uuid: str | None, place: str, label: str) -> MediaSource:
    what = f"{place} of {label}"
    if value is None:
        if uuid is None:
            raise InvalidRequestError(f"{what} is None, and no uuid says what it was", place)
        return ImageSource(None, "auto", place, uuid) if kind == "image" else VideoSource(None, place, uuid)
    if kind == "video":
        return VideoSource(_video(value, what), place, uuid)
    if not _is_frame(value):
        raise _wrong(kind, value, what)
    image = value if isinstance(value, Image.Image) else Image.fromarray(_checked(value, what))
    return ImageSource(image, "auto", place, uuid)


def _video(value: Any, what: str) -> GivenVideo:
    frames, said = value if _has_metadata(value) else (value, {})
    if not _is_frames(frames):
        raise _wrong("video", frames, what)
    if len(frames) == 0:
        raise InvalidRequestError(f"{what} has no frames")
    if isinstance(frames, np.ndarray):
        _checked(frames, what)
    else:
        frames = [frame if isinstance(frame, Image.Image) else _checked(frame, what) for frame in frames]
        sizes = {_size(frame) for frame in frames}
        if len(sizes) > 1:
            raise InvalidRequestError(f"{what} has frames of different sizes; the frames of a video have one")
    return _placed(frames, said, what)


def _placed(frames: Sequence[Frame], said: Mapping[str, Any], what: str) -> GivenVideo:
    """With what their metadata say of frames."""
    known = {"fps", "total_num_frames", "frames_indices", "do_sample_frames"}
    unknown = said.keys() - known - _WITHOUT_EFFECT
    if unknown:
        raise InvalidRequestError(f"metadata of {what}: {shown(min(map(str, unknown)))} is not known")
    fps = _fps(said.get("fps"), what)
    indices, samples = said.get("frames_indices"), said.get("do_sample_frames")
    total = len(frames) if said.get("total_num_frames") is None else said["total_num_frames"]
    chosen = _numbers(indices, len(frames), what) if indices is not None else tuple(range(len(frames)))
    if type(total) is not int or total <= chosen[-1] or (indices is None and total != len(frames)):
        raise InvalidRequestError(
            f"metadata of {what}: total_num_frames is {shown(total)}, which does not fit {len(frames)} frames up to "
            f"number {chosen[-1]}; frames_indices says which frames of a longer video they are"
        )
    is_all = len(chosen) == total
    if samples is True and not is_all:
        raise InvalidRequestError(f"metadata of {what}: do_sample_frames is true, but the frames were chosen already")
    is_chosen = samples is False or not is_all or (indices is not None and samples is None)
    return GivenVideo(frames, fps, total, chosen if is_chosen else None)


def _fps(value: object, what: str) -> float:
    if value is None:
        return DEFAULT_FPS
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0 < value < math.inf:
        raise InvalidRequestError(f"metadata of {what}: fps must be a number above 0, not {shown(value)}")
    return float(value)


def _numbers(indices: Any, count: int, what: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(each) for each in indices)
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) != count or list(numbers) != sorted(numbers) or numbers[0] < 0:
        raise InvalidRequestError(
            f"metadata of {what}: frames_indices must be the numbers of its {count} frames, ascending"
        )
    return numbers


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple)


def _is_frame(value: object) -> bool:
    return isinstance(value, Image.Image) or (isinstance(value, np.ndarray) and value.ndim == 3)


def _is_frames(value: object) -> bool:
    """Also of a list with nothing in it."""
    return (isinstance(value, np.ndarray) and value.ndim == 4) or (_is_list(value) and all(map(_is_frame, value)))


def _has_metadata(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping)


def _is_video(value: object) -> bool:
    return _has_metadata(value) or (_is_frames(value) and (isinstance(value, np.ndarray) or len(value) > 0))  # type: ignore[arg-type]


def _size(frame: Frame) -> tuple[int, int]:
    """(width, height)"""
    return frame.size if isinstance(frame, Image.Image) else (frame.shape[1], frame.shape[0])


def _checked(pixels: Any, what: str) -> Any:
    if pixels.dtype != np.uint8 or pixels.shape[-1] != 3 or 0 in pixels.shape[-3:]:
        raise InvalidRequestError(
            f"{what} is an array of {pixels.dtype} {list(pixels.shape)}; pixels are uint8, red, green and blue in the "
            "last dimension"
        )
    return pixels


def _wrong(kind: str, value: object, what: str) -> TypeError:
    wanted = "an image of Pillow's or uint8 [height, width, 3]" if kind == "image" else f"{_FRAMES}, or (frames, dict)"
    return TypeError(f"{what} must be {wanted}, or a list of these; got {type(value).__name__}")
