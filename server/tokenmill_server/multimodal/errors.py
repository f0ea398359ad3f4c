"""What is wrong with media that a client sent or named."""

from tokenmill_engine.errors import InvalidRequestError


class MediaError(InvalidRequestError):
    """Media that cannot be had, or may not be."""

    code = "invalid_media"
