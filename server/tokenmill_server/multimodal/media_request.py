"""The media of one request, and what it may have."""

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(slots=True, frozen=True)
class MediaRequest:
    """What a request has."""

    sources: Sequence[MediaSource]
    wishes: MediaWishes | None = None
    """None: as the flags say."""
    scope: tuple[str, ...] = ()
    """Uuids mean something within this alone."""
