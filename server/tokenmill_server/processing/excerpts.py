"""Long texts of which only an end counts: the tokens of that end are found without those of all the text, which may be
megabytes, and its tokens gigabytes."""

from typing import Literal, Protocol

Side = Literal["left", "right"]

_CHARS_PER_TOKEN = 32
"""Far more than words have."""
_MARGIN = 16
"""Tokens beyond those that count: where the text was cut, tokens may be others than in the whole text."""
_GROWTH = 8


class Encoder(Protocol):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`."""


def may_be_cut(text: str, num_tokens: int) -> bool:
    """Whether `excerpt` looks at `text` at all."""
    return len(text) > _chars_of(num_tokens)


def excerpt(encoder: Encoder, text: str, num_tokens: int, side: Side) -> str:
    """A part of `text` with more than `num_tokens` tokens, which begins (`right`: what is cut off is on the right) or
    ends with the same `num_tokens` as the whole; all of it, if it has no more or is not long anyway."""
    num_chars = _chars_of(num_tokens)
    while num_chars < len(text):
        part = _cut(text, num_chars, side)
        if len(encoder.encode(part, add_special_tokens=False)) >= num_tokens + _MARGIN:
            return part
        num_chars *= _GROWTH
    return text


def _chars_of(num_tokens: int) -> int:
    return _CHARS_PER_TOKEN * (num_tokens + _MARGIN)


def _cut(text: str, num_chars: int, side: Side) -> str:
    """About `num_chars` of the beginning or end, without half of a word there if that can be had."""
    if side == "right":
        part = text[:num_chars]
        space = part.rfind(" ")
        return part if space < num_chars // 2 else part[:space]
    part = text[-num_chars:]
    space = part.find(" ")
    return part if not 0 <= space < num_chars // 2 else part[space:]
