"""What is wrong with media that a client sent or named, or with the processes that decode them."""

import signal

from tokenmill_engine.errors import InvalidRequestError, OverloadedError

CRASHES = frozenset({-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGFPE, -signal.SIGILL})
"""Exit statuses of processes that a file made crash. Other signals come from outside."""


class MediaError(InvalidRequestError):
    """Media that cannot be had, or may not be."""

    code = "invalid_media"


class DecoderKilledError(OverloadedError):
    """A process that decoded media was killed from outside, as when the machine has no memory left. No file's fault."""
