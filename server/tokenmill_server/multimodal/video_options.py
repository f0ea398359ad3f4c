"""How a model's videos are prepared: read from the files beside its weights.

`video_processor` in `processor_config.json`, else `video_preprocessor_config.json`, else `preprocessor_config.json`, as
transformers looks for it. What is not said there is the default of transformers' video processor.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tokenmill_engine.config.hf_folder import read_optional_json
from tokenmill_engine.config.media import MediaConfig, VisionConfig
from tokenmill_engine.config.views import ViewsConfig
from tokenmill_engine.errors import ConfigError
from tokenmill_server.multimodal.processor_kwargs import ProcessorKwargs

VideoMethod = Literal["qwen2_vl", "qwen3_vl", "onevision"]
Triple = tuple[float, float, float]

_METHODS: Mapping[str, VideoMethod] = {
    "Qwen2VLVideoProcessor": "qwen2_vl",
    "Qwen2_5_VLVideoProcessor": "qwen2_vl",
    "Qwen3VLVideoProcessor": "qwen3_vl",
    "LlavaOnevisionVideoProcessor": "onevision",
}
_COMMON: Mapping[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "rescale_factor": 1 / 255,
    "resample": 3,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_frames": 4,
    "max_frames": 768,
    "num_frames": None,
    "cap_pixels_per_frame": False,
}
_DEFAULTS: Mapping[VideoMethod, Mapping[str, Any]] = {
    "qwen2_vl": {
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
        "image_mean": (0.48145466, 0.4578275, 0.40821073),
        "image_std": (0.26862954, 0.26130258, 0.27577711),
        "patch_size": 14,
        "do_sample_frames": False,
        "fps": None,
        "max_video_tokens": 128000,
    },
    "qwen3_vl": {
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
        "patch_size": 16,
        "do_sample_frames": True,
        "fps": 2.0,
        "max_video_tokens": 768,
    },
    "onevision": {
        "size": {"height": 384, "width": 384},
        "image_mean": (0.48145466, 0.4578275, 0.40821073),
        "image_std": (0.26862954, 0.26130258, 0.27577711),
        "patch_size": 1,
        "temporal_patch_size": 1,
        "merge_size": 1,
        "do_sample_frames": False,
        "fps": None,
        "max_video_tokens": 0,
    },
}


@dataclass(frozen=True, slots=True)
class VideoOptions:
    """Everything that changes what becomes of a video's frames, once they are chosen and decoded, and how the model's
    own processor chooses them."""

    method: VideoMethod
    resample: int
    """Pillow's number of a filter."""
    rescale_factor: float | None
    mean: Triple | None
    std: Triple | None
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    """Of a frame (Qwen2-VL) or of all frames together (Qwen3-VL): their number is brought between these."""
    caps_pixels: bool
    """Whether many frames become smaller ones, as `max_video_tokens` says."""
    max_video_tokens: int
    samples: bool
    """Whether the processor chooses frames."""
    fps: float | None
    """How many of a second it chooses."""
    num_frames: int | None
    """How many of a video, whatever `fps` is."""
    min_frames: int
    max_frames: int
    views: ViewsConfig | None = None
    """LLaVA-OneVision: every frame is one view, of which the other sizes here say nothing."""

    @property
    def factor(self) -> int:
        """Sides of frames become multiples of so many pixels."""
        return self.patch_size * self.merge_size

    def with_kwargs(self, said: ProcessorKwargs) -> "VideoOptions":
        """Options where what a user said counts."""
        changes: dict[str, Any] = {
            "min_pixels": said.min_pixels,
            "max_pixels": said.max_pixels,
            "min_frames": said.min_frames,
            "max_frames": said.max_frames,
            "samples": True if said.states_sampling else said.do_sample_frames,
            "caps_pixels": said.cap_pixels_per_frame,
        }
        changed = replace(self, **{name: value for name, value in changes.items() if value is not None})
        if said.fps is not None or said.num_frames is not None:  # they exclude each other
            changed = replace(changed, fps=said.fps, num_frames=said.num_frames)
        return changed

    def text(self) -> str:
        """All of it, for keys."""
        return json.dumps(asdict(self), sort_keys=True)


def read_video_options(folder: Path, media: MediaConfig) -> VideoOptions:
    """Options of the model in `folder`. Raises ConfigError for what is malformed, or not done exactly."""
    given, source = _read(folder)
    try:
        return _options(given, media, source)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{source} is malformed: {error!r}") from error


def _read(folder: Path) -> tuple[dict[str, Any], str]:
    file = folder / "processor_config.json"
    inner = read_optional_json(file).get("video_processor")
    if isinstance(inner, dict) and inner:
        return inner, str(file)
    for name in ("video_preprocessor_config.json", "preprocessor_config.json"):
        given = read_optional_json(folder / name)
        if given:
            return given, str(folder / name)
    raise ConfigError(
        f"{folder} has no video_preprocessor_config.json, which says how videos are prepared; add the model's, or take "
        """none with --limit-mm-per-prompt '{"image": 0, "video": 0}'"""
    )


def _options(given: Mapping[str, Any], media: MediaConfig, source: str) -> VideoOptions:
    method = _method(given, media, source)
    values = {**_COMMON, **_DEFAULTS[method], **{key: value for key, value in given.items() if value is not None}}
    if not values["do_resize"]:
        raise ConfigError(f"{source}: videos that are not resized (do_resize) are not supported")
    if int(values["resample"]) not in range(6):
        raise ConfigError(f"{source}: resample is {values['resample']}; Pillow's filters have the numbers 0 to 5")
    if media.views is not None:
        values["size"] = _frame_edges(values, media.views, source)
    else:
        _check_patches(values, media.vision, source)
    size, normalizes = values["size"], bool(values["do_normalize"])
    old = values if method == "qwen2_vl" else {}
    return VideoOptions(
        method=method,
        resample=int(values["resample"]),
        rescale_factor=float(values["rescale_factor"]) if values["do_rescale"] else None,
        mean=_triple(values["image_mean"]) if normalizes else None,
        std=_triple(values["image_std"]) if normalizes else None,
        patch_size=int(values["patch_size"]),
        temporal_patch_size=int(values["temporal_patch_size"]),
        merge_size=int(values["merge_size"]),
        min_pixels=int(old.get("min_pixels") or size["shortest_edge"]),
        max_pixels=int(old.get("max_pixels") or size["longest_edge"]),
        caps_pixels=bool(values["cap_pixels_per_frame"]),
        max_video_tokens=int(values["max_video_tokens"]),
        samples=bool(values["do_sample_frames"]),
        fps=None if values["fps"] is None else float(values["fps"]),
        num_frames=None if values["num_frames"] is None else int(values["num_frames"]),
        min_frames=int(values["min_frames"]),
        max_frames=int(values["max_frames"]),
        views=media.views,
    )


def _check_patches(values: Mapping[str, Any], vision: VisionConfig, source: str) -> None:
    for name, wanted in (
        ("patch_size", vision.patch_size),
        ("temporal_patch_size", vision.temporal_patch_size),
        ("merge_size", vision.spatial_merge_size),
    ):
        if int(values[name]) != wanted:
            raise ConfigError(f"{source}: {name} is {values[name]}, but {wanted} in config.json")


def _frame_edges(values: Mapping[str, Any], views: ViewsConfig, source: str) -> dict[str, int]:
    """Frames that are views have one size, which is no limit."""
    size = values["size"]
    if (size.get("height"), size.get("width")) != (views.view_size, views.view_size) or values.get("do_center_crop"):
        raise ConfigError(
            f"{source}: frames must become {views.view_size} x {views.view_size} pixels, as the vision tower takes them"
        )
    return {"shortest_edge": 0, "longest_edge": 0}


def _method(given: Mapping[str, Any], media: MediaConfig, source: str) -> VideoMethod:
    """A file of images alone says nothing of videos: the model does."""
    own: VideoMethod = "qwen3_vl" if media.frames_apart else "qwen2_vl"
    own = own if media.views is None else "onevision"
    name = given.get("video_processor_type")
    if name is None:
        return own
    if name not in _METHODS:
        raise ConfigError(f"{source}: videos are prepared by {name}; supported: {', '.join(_METHODS)}")
    if _METHODS[name] != own:
        wanted = next(each for each, method in _METHODS.items() if method == own)
        raise ConfigError(f"{source}: {name} does not fit this model, whose videos are prepared as by {wanted}")
    return own


def _triple(values: Any) -> Triple:
    first, second, third = map(float, values)
    return first, second, third
