"""The media of one request, and what it may have."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill_engine.config.media import MediaConfig
from tokenmill_engine.errors import ContextLengthError
from tokenmill_engine.messages import MediaItem
from tokenmill_engine.mrope import longest_with
from tokenmill_server.multimodal.parts import MediaSource
from tokenmill_server.multimodal.settings import PromptLimits
from tokenmill_server.multimodal.wishes import MediaWishes


@dataclass(slots=True, frozen=True)
class MediaLimits(PromptLimits):
    """What a request to this model may have; 0: none of that kind."""

    max_image_tokens: int = 0
    """Of one image."""
    one_view_of_several: bool = False
    """A model that sees an image in several views, too, sees several images in one each, as it was trained."""
    num_positions: int = 0
    """As in `ModelConfig`."""


@dataclass(slots=True, frozen=True)
class MediaRequest:
    """What a request has."""

    sources: Sequence[MediaSource]
    wishes: MediaWishes | None = None
    """None: as the flags say."""
    scope: tuple[str, ...] = ()
    """Uuids mean something within this alone."""


def check_positions(num_tokens: int, items: Sequence[MediaItem], media: MediaConfig, limits: MediaLimits) -> None:
    """Raises ContextLengthError if a prompt of so many tokens with these `items` has no position for another one: those
    of a video are as far apart as its length says."""
    longest = longest_with(items, media, limits.num_positions)
    if num_tokens >= longest and longest < limits.num_positions:
        raise ContextLengthError(
            f"the videos last so long that the prompt takes {num_tokens + limits.num_positions - longest} positions of "
            f"the {limits.num_positions} that there are; send shorter ones",
            "messages",
        )
