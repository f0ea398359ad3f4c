"""How a model's images are prepared: read from the files beside its weights.

`preprocessor_config.json`, or `image_processor` in `processor_config.json`, says which of transformers' image
processors and with which numbers. What is not said there is that processor's default.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tokenmill_engine.config.hf_folder import read_optional_json
from tokenmill_engine.config.hf_views import pinpoints
from tokenmill_engine.config.media import MediaConfig
from tokenmill_engine.config.views import ViewsConfig
from tokenmill_engine.errors import ConfigError

Method = Literal["qwen2_vl", "clip", "siglip", "llava", "onevision"]
Triple = tuple[float, float, float]

_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_HALVES = (0.5, 0.5, 0.5)
_METHODS: Mapping[str, Method] = {
    "Qwen2VLImageProcessor": "qwen2_vl",
    "Qwen2_5_VLImageProcessor": "qwen2_vl",
    "CLIPImageProcessor": "clip",
    "CLIPFeatureExtractor": "clip",
    "SiglipImageProcessor": "siglip",
    "LlavaImageProcessor": "llava",
    "LlavaOnevisionImageProcessor": "onevision",
}
_DEFAULTS: Mapping[Method, Mapping[str, Any]] = {
    "qwen2_vl": {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}},
    "clip": {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}, "do_center_crop": True},
    "siglip": {"size": {"height": 224, "width": 224}, "image_mean": _HALVES, "image_std": _HALVES},
    "onevision": {"size": {"height": 384, "width": 384}, "do_pad": True, "image_grid_pinpoints": None},
    "llava": {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}, "do_center_crop": True},
}
_COMMON: Mapping[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_center_crop": False,
    "do_pad": False,
    "rescale_factor": 1 / 255,
    "resample": 3,
    "image_mean": _CLIP_MEAN,
    "image_std": _CLIP_STD,
}


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """Everything that changes what becomes of an image's pixels. Sizes are (height, width)."""

    method: Method
    resample: int
    """Pillow's number of a filter: 2 bilinear, 3 bicubic."""
    rescale_factor: float | None
    """What values of 0 to 255 are multiplied by; None: nothing."""
    mean: Triple | None
    std: Triple | None
    """None: values are not normalized."""
    shortest_edge: int | None = None
    """The shorter side becomes this long and the other follows."""
    size: tuple[int, int] | None = None
    """Both sides become so long."""
    crop_size: tuple[int, int] | None = None
    pads_to_square: bool = False
    """First of all, with the mean colour."""
    patch_size: int = 1
    temporal_patch_size: int = 1
    merge_size: int = 1
    min_pixels: int = 0
    max_pixels: int = 0
    """Qwen2-VL: the number of pixels is brought between these."""
    views: ViewsConfig | None = None
    """LLaVA-OneVision: an image is seen in several views; None: in one."""

    def text(self) -> str:
        """All of it, for keys."""
        return json.dumps(asdict(self), sort_keys=True)


def read_image_options(folder: Path, media: MediaConfig) -> ImageOptions:
    """Options of the model in `folder`. Raises ConfigError for what is malformed, or not done exactly."""
    given, source = _read(folder)
    try:
        return _options(given, media, source)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{source} is malformed: {error!r}") from error


def _options(given: Mapping[str, Any], media: MediaConfig, source: str) -> ImageOptions:
    method = _method(given, media, source)
    values = {**_COMMON, **_DEFAULTS[method], **{key: value for key, value in given.items() if value is not None}}
    if not values["do_resize"]:
        raise ConfigError(f"{source}: images that are not resized (do_resize) are not supported")
    if int(values["resample"]) not in range(6):
        raise ConfigError(f"{source}: resample is {values['resample']}; Pillow's filters have the numbers 0 to 5")
    normalizes = bool(values["do_normalize"])
    common: dict[str, Any] = {
        "method": method,
        "resample": int(values["resample"]),
        "rescale_factor": float(values["rescale_factor"]) if values["do_rescale"] else None,
        "mean": _triple(values["image_mean"], source) if normalizes else None,
        "std": _triple(values["image_std"], source) if normalizes else None,
    }
    if method == "qwen2_vl":
        return _qwen2_vl(values, media, source, common)
    if media.views is not None:
        return _views(values, media.views, source, common)
    options = _one_size(values, source, common)
    wanted = media.vision.image_size
    if (options.crop_size or options.size) != (wanted, wanted):
        raise ConfigError(
            f"{source}: images become {options.crop_size or options.size or 'of any size'}, but the vision tower "
            f"takes {wanted} x {wanted} pixels"
        )
    return options


def _read(folder: Path) -> tuple[dict[str, Any], str]:
    file = folder / "preprocessor_config.json"
    given = read_optional_json(file)
    if given:
        return given, str(file)
    file = folder / "processor_config.json"
    inner = read_optional_json(file).get("image_processor")
    if isinstance(inner, dict) and inner:
        return inner, str(file)
    raise ConfigError(
        f"{folder} has no preprocessor_config.json, which says how images are prepared; add the model's, or take text "
        """alone with --limit-mm-per-prompt '{"image": 0, "video": 0}'"""
    )


def _method(given: Mapping[str, Any], media: MediaConfig, source: str) -> Method:
    name = str(given.get("image_processor_type") or given.get("feature_extractor_type") or "")
    bare = name.removesuffix("Fast").removesuffix("Pil")
    if not name and media.views is not None:
        return "onevision"
    if not name:
        return "qwen2_vl" if media.kind == "qwen2_vl" else "siglip" if media.vision.kind == "siglip" else "clip"
    if bare not in _METHODS:
        raise ConfigError(f"{source}: images are prepared by {name}; supported: {', '.join(_METHODS)}")
    method = _METHODS[bare]
    kinds = {"qwen2_vl": "qwen2_vl", "onevision": "llava_onevision"}
    if kinds.get(method, "llava") != media.kind:
        raise ConfigError(f"{source}: {name} does not fit a model of the kind {media.kind}")
    return method


def _qwen2_vl(values: Mapping[str, Any], media: MediaConfig, source: str, common: dict[str, Any]) -> ImageOptions:
    vision, size = media.vision, values["size"]
    sizes = {
        "patch_size": (int(values.get("patch_size", 14)), vision.patch_size),
        "temporal_patch_size": (int(values.get("temporal_patch_size", 2)), vision.temporal_patch_size),
        "merge_size": (int(values.get("merge_size", 2)), vision.spatial_merge_size),
    }
    for name, (prepared, wanted) in sizes.items():
        if prepared != wanted:
            raise ConfigError(f"{source}: {name} is {prepared}, but {wanted} in config.json")
    return ImageOptions(
        **common,
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        merge_size=vision.spatial_merge_size,
        min_pixels=int(values.get("min_pixels") or size["shortest_edge"]),
        max_pixels=int(values.get("max_pixels") or size["longest_edge"]),
    )


def _views(values: Mapping[str, Any], views: ViewsConfig, source: str, common: dict[str, Any]) -> ImageOptions:
    """Squares of the whole size too, where an image is seen in one view."""
    if pinpoints(values["image_grid_pinpoints"], source) != views.sizes:
        raise ConfigError(f"{source}: image_grid_pinpoints are not those of config.json")
    if common["mean"] is None:
        raise ConfigError(f"{source}: images that are not normalized (do_normalize) are not supported for this model")
    options = _one_size({**values, "do_pad": False}, source, common)
    if options.size != (views.view_size, views.view_size) or options.crop_size is not None:
        raise ConfigError(f"{source}: size must be that of the vision tower, {views.view_size} x {views.view_size}")
    return replace(options, pads_to_square=True, views=views)


def _one_size(values: Mapping[str, Any], source: str, common: dict[str, Any]) -> ImageOptions:
    if values["do_pad"] and common["method"] != "llava":
        raise ConfigError(f"{source}: do_pad is not supported with this image processor")
    size: Any = values["size"]
    crop: Any = values.get("crop_size")
    if isinstance(size, int):
        size = {"shortest_edge": size} if common["method"] != "siglip" else {"height": size, "width": size}
    if isinstance(crop, int):
        crop = {"height": crop, "width": crop}
    if set(size) == {"shortest_edge"}:
        common["shortest_edge"] = int(size["shortest_edge"])
    elif set(size) == {"height", "width"}:
        common["size"] = (int(size["height"]), int(size["width"]))
    else:
        raise ConfigError(f"{source}: size must have shortest_edge, or height and width; it has {', '.join(size)}")
    if values["do_center_crop"]:
        common["crop_size"] = (int(crop["height"]), int(crop["width"]))
    return ImageOptions(**common, pads_to_square=bool(values["do_pad"]))


def _triple(value: Any, source: str) -> Triple:
    numbers = [value] * 3 if isinstance(value, int | float) else list(value)
    if len(numbers) != 3:
        raise ConfigError(f"{source}: image_mean and image_std have three numbers")
    return (float(numbers[0]), float(numbers[1]), float(numbers[2]))
