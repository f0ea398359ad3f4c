"""The parts of a `config.json` of LLaVA-OneVision that say how an image is cut into views. Torch-free."""

import re
from collections.abc import Mapping
from typing import Any

from tokenmill_engine.config.media import VisionConfig
from tokenmill_engine.config.views import ViewsConfig
from tokenmill_engine.errors import ConfigError

_STEPS = (384, 768, 1152, 1536, 1920, 2304)
_ASPECT_RATIO = re.compile(r"anyres_max_([1-9]\d*)")


def parse_views(config: Mapping[str, Any], vision: VisionConfig, source: str) -> ViewsConfig:
    """Raises ConfigError for views that are not supported."""
    size = vision.image_size or 0
    ratio = config.get("vision_aspect_ratio", "anyres_max_9")
    match = _ASPECT_RATIO.fullmatch(str(ratio))
    if match is None:
        raise ConfigError(f"{source}: vision_aspect_ratio {ratio!r} is not supported, only anyres_max_N")
    sizes = pinpoints(config.get("image_grid_pinpoints"), source)
    if not sizes or any(length <= 0 or length % size for each in sizes for length in each):
        raise ConfigError(f"{source}: image_grid_pinpoints must be multiples of the tower's {size} pixels")
    side = size // vision.patch_size
    if vision.tokens_per_image != side**2:
        raise ConfigError(
            f"{source}: an image is {vision.tokens_per_image} states of the tower, which are no {side} x {side}; set "
            "vision_feature_select_strategy to 'full' for siglip, 'default' for clip"
        )
    return ViewsConfig(sizes, int(match[1]), size, side)


def pinpoints(stated: Any, source: str) -> tuple[tuple[int, int], ...]:
    """`image_grid_pinpoints`, by default those of the published models. Raises ConfigError if they are no pairs."""
    if stated is None:
        return tuple((height, width) for height in _STEPS for width in _STEPS)
    pairs = [tuple(map(int, pair)) for pair in stated]
    if any(len(pair) != 2 for pair in pairs):
        raise ConfigError(f"{source}: image_grid_pinpoints must be pairs of height and width")
    return tuple((pair[0], pair[1]) for pair in pairs)
