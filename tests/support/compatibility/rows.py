"""What a row of the compatibility table is. The tests try every row; `docs/make_pages.py` prints them."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """What becomes of something that clients of OpenAI's API or of vLLM may use."""

    WORKS = "works"
    DIFFERS = "works differently"
    REFUSED = "refused: 400 that names it"
    LISTED = "no effect, listed in `X-Ignored-Fields`"
    ABSENT = "not there"


@dataclass(frozen=True, slots=True)
class FieldRow:
    """A field of requests, with a value that changes the outcome if it works."""

    name: str
    value: Any
    status: Status = Status.WORKS
    beside: dict[str, Any] = field(default_factory=dict)
    """Other fields without which it does nothing."""
    status_code: int = 200
    """Of the answer, if the field is taken."""
    needs: str = ""
    """Flags without which it is refused."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class RouteRow:
    """A method and a path, with a body that is answered with 200."""

    method: str
    path: str
    status: Status = Status.WORKS
    body: dict[str, Any] | None = None
    needs: str = ""
    """The flag without which it is not there."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class ReplyRow:
    """A field of answers; `[]` stands for each entry of a list."""

    path: str
    status: Status = Status.WORKS
    note: str = ""
