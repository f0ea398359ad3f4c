"""What those who prepare an item in a thread ask of those who want it."""

from collections.abc import Callable
from dataclasses import dataclass

from tokenmill_server.multimodal.items import PreparedItem

Admit = Callable[[int], None]
"""Called with the number of an item's tokens once that is known. Raises if nobody has room for so many, or everybody is
gone."""
Find = Callable[[bytes], PreparedItem | None]
"""The item with this key, if it is known."""
Check = Callable[[], None]
"""Called several times a second while a thread waits. Raises if everybody is gone."""

LOOK_UP_S = 0.2
"""How often threads that wait look whether anybody wants what they do."""


class NobodyHasRoomError(Exception):
    """All requests that wanted an item at that time had no room for it, or were gone."""


def always() -> None:
    """A `Check` of who does not give up."""


@dataclass(frozen=True, slots=True)
class Asking:
    """Of those who want one item. Used from any thread."""

    admit: Admit
    find: Find
    check: Check = always
