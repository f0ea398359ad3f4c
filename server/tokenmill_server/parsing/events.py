"""What parsers of generated text say, piece by piece: text for people, and calls of tools.

A parser is a state machine of one output. What it says depends on the text alone, not on how it is cut into pieces:
texts and arguments are joined by whoever listens.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, frozen=True)
class Text:
    """More text that is no call."""

    text: str


@dataclass(slots=True, frozen=True)
class CallStart:
    """A call begins."""

    name: str


@dataclass(slots=True, frozen=True)
class Arguments:
    """More of the JSON of the arguments of the call that began last."""

    text: str


Event = Text | CallStart | Arguments


class ToolParser(Protocol):
    """Finds calls in one output."""

    def push(self, text: str) -> list[Event]:
        """What is certain after `text` more."""

    def finish(self) -> list[Event]:
        """What was held back, at the end of the output. A call that has begun stays as incomplete as it is."""


def held_back(text: str, tags: Iterable[str]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `tags`."""
    longest = 0
    for tag in tags:
        for length in range(min(len(tag) - 1, len(text)), longest, -1):
            if text.endswith(tag[:length]):
                longest = length
                break
    return longest


def may_become(text: str, tag: str) -> bool:
    """Whether `text` is a beginning of `tag`, but not all of it."""
    return len(text) < len(tag) and tag.startswith(text)
