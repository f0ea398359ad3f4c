"""How many images and videos a request may have, as users write it."""

import json
from dataclasses import replace
from typing import Any

from tokenmill_engine.config.media import MediaConfig
from tokenmill_server.multimodal.settings import MOST_ITEMS, PromptLimits

_WANTED = 'how many images and videos a request may have, such as {"image": 4, "video": 1}'
_NAMES = ("image", "video", "audio")


def prompt_limits(value: object) -> PromptLimits:
    """From a mapping, JSON, or `image=4`. Instead of a number there may be an object with its `count`; the sizes that
    stand beside it are hints that nothing here needs. What was read before stays as it is."""
    if isinstance(value, PromptLimits):
        return value
    if isinstance(value, str):
        value = _read(value)
    if isinstance(value, int) and not isinstance(value, bool):
        value = {"image": value}
    if not isinstance(value, dict) or not set(value) <= set(_NAMES):
        raise ValueError(_WANTED)
    counts: dict[str, Any] = {
        name: each.get("count", MOST_ITEMS) if isinstance(each, dict) else each for name, each in value.items()
    }
    if any(not isinstance(count, int) or isinstance(count, bool) or count < 0 for count in counts.values()):
        raise ValueError(_WANTED)
    if counts.get("audio"):
        raise ValueError(f"{_WANTED}; audio is not supported, its limit is 0")
    return PromptLimits(int(counts.get("image", MOST_ITEMS)), int(counts.get("video", MOST_ITEMS)))


def limits_of(media: MediaConfig, asked: PromptLimits) -> PromptLimits:
    """Of what is `asked` for, what a model takes at all."""
    return asked if media.takes_video else replace(asked, videos=0)


def _read(text: str) -> Any:
    try:
        if "=" not in text:
            return json.loads(text)
        pairs = [pair.partition("=") for pair in text.split(",")]
        return {name.strip(): int(count) for name, _, count in pairs}
    except ValueError:
        raise ValueError(_WANTED) from None
