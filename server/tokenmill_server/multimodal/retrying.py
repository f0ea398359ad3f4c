"""Media are decoded once more if the process that did it was killed: by the system, which wanted its memory back."""

import logging
from collections.abc import Callable
from typing import TypeVar

from tokenmill_server.multimodal.asking import Check
from tokenmill_server.multimodal.decoding_memory import Kind
from tokenmill_server.multimodal.errors import DecoderKilledError

T = TypeVar("T")

_NAMES: dict[Kind, str] = {"image": "an image", "video": "a video"}

logger = logging.getLogger(__name__)


def tried_twice(work: Callable[[], T], kind: Kind, check: Check) -> T:
    """What `work` returns, in the second attempt if a process is killed in the first. `work` holds nothing in between:
    others may want it.

    Raises what `work` does, and what `check` does before the second attempt.
    """
    try:
        return work()
    except DecoderKilledError:
        logger.warning("a process that decoded %s was killed from outside: one more attempt", _NAMES[kind])
        check()
    return work()
