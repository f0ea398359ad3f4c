"""How the media of one request are read and prepared: as the flags say, or as the request does."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_server.multimodal.media_kwargs import media_io_kwargs, processor_kwargs
from tokenmill_server.multimodal.processor_kwargs import ProcessorKwargs
from tokenmill_server.multimodal.settings import MediaSettings
from tokenmill_server.multimodal.video_reading import VideoReading
from tokenmill_server.processing.shown import shown


@dataclass(frozen=True, slots=True)
class MediaWishes:
    """What holds for one request."""

    reading: VideoReading
    kwargs: ProcessorKwargs


class WishReader:
    """Knows what the flags say, and what a model can be told."""

    def __init__(self, settings: MediaSettings, *, takes_kwargs: bool) -> None:
        """`takes_kwargs`: the model's processors have something to set."""
        self._flags = MediaWishes(settings.video_reading, settings.processor_kwargs)
        self._trusts_requests = settings.trusts_requests
        self._takes_kwargs = takes_kwargs

    def read(
        self, io: Mapping[str, Any] | None = None, processor: Mapping[str, Any] | None = None, *, is_local: bool = False
    ) -> MediaWishes:
        """`io` and `processor` are media_io_kwargs and mm_processor_kwargs of a request; None: it has none. With
        `is_local` it comes from within this program.

        Raises InvalidRequestError for what is not known, or not allowed.
        """
        if not io and not processor:
            return self._flags
        if not is_local and not self._trusts_requests:
            raise InvalidRequestError(
                "this server takes media_io_kwargs and mm_processor_kwargs of requests only when it is started with "
                "--trust-request-mm-kwargs",
                "mm_processor_kwargs" if processor else "media_io_kwargs",
                "unsupported_parameter",
            )
        try:
            reading = media_io_kwargs(io) if io else self._flags.reading
        except ValueError as error:
            raise InvalidRequestError(f"media_io_kwargs: {error}", "media_io_kwargs") from error
        try:
            said = processor_kwargs(processor or {})
            if not said.is_empty and not self._takes_kwargs:
                raise ValueError("the images of this model have one size, and there is nothing to set")
        except ValueError as error:
            raise InvalidRequestError(f"mm_processor_kwargs: {error}", "mm_processor_kwargs") from error
        return MediaWishes(reading, said.over(self._flags.kwargs))


def read_wishes(
    reader: WishReader | None,
    model: str,
    io: Mapping[str, Any] | None,
    processor: Mapping[str, Any] | None,
    *,
    is_local: bool = False,
) -> MediaWishes | None:
    """As `WishReader.read`, for a model that is called `model`. `reader` None: it takes text only, and nothing may be
    said."""
    if reader is not None:
        return reader.read(io, processor, is_local=is_local)
    for name, value in (("media_io_kwargs", io), ("mm_processor_kwargs", processor)):
        if value:
            raise InvalidRequestError(
                f"the model {shown(model)} takes text only: {name} is not supported", name, "unsupported_parameter"
            )
    return None
