"""Thinking that ends after so many tokens, and what follows it.

Two grammars: one in which thinking has no limit, and one of its end and of what follows. Once there are as many tokens
as are possible, the output goes on in the second one. The tokens of the tags do not count.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.structured_output.grammar import Grammar, Matcher


@dataclass(frozen=True, slots=True)
class Limit:
    """Of the thinking at the beginning of an output."""

    begin: str
    """The output thinks if it begins so; empty: in any case."""
    end: str
    max_tokens: int


def split(tag: Any) -> tuple[Limit, Any, Any] | None:
    """The limit in a structural tag, the same without it, and what follows once it is reached. None: it has none, or
    not at its beginning."""
    form: Any = tag.get("format") if isinstance(tag, dict) else None
    elements = form.get("elements") if isinstance(form, dict) and form.get("type") == "sequence" else None
    if not isinstance(elements, list) or not elements or not isinstance(elements[0], dict):
        return None
    first: dict[str, Any] = elements[0]
    rest = elements[1:]
    is_optional = first.get("type") == "optional" and first.keys() == {"type", "content"}
    thinking: Any = first["content"] if is_optional else first
    if not isinstance(thinking, dict) or thinking.get("type") != "tag" or not isinstance(thinking.get("content"), dict):
        return None
    text, begin, end = thinking["content"], thinking.get("begin"), thinking.get("end")
    most = text.get("max_tokens")
    if text.get("type") != "any_text" or type(most) is not int or not isinstance(end, str) or not end:
        return None
    if not isinstance(begin, str) or is_optional != bool(begin):
        return None
    free: dict[str, Any] = {
        **thinking,
        "content": {name: value for name, value in text.items() if name != "max_tokens"},
    }
    first = {**first, "content": free} if is_optional else free
    closing = {"type": "const_string", "value": end}
    return (
        Limit(begin, end, most),
        {**tag, "format": {**form, "elements": [first, *rest]}},
        {**tag, "format": {**form, "elements": [closing, *rest]}},
    )


@dataclass(frozen=True, slots=True)
class Spelling:
    """What tokens write."""

    token_bytes: Sequence[bytes]
    spell: Callable[[str], list[int]]
    """Any tokens that write a text."""


class LimitedGrammar:
    """Both grammars, with one vocabulary."""

    def __init__(self, limit: Limit, free: Grammar, closing: Grammar, spelling: Spelling) -> None:
        self.num_bytes = free.num_bytes + closing.num_bytes
        self._limit, self._free, self._closing, self._spelling = limit, free, closing, spelling

    def matcher(self) -> "LimitedMatcher":
        """As `Grammar`."""
        return LimitedMatcher(self._limit, self._free.matcher(), self._closing, self._spelling)


class LimitedMatcher:
    """State of one output."""

    def __init__(self, limit: Limit, matcher: Matcher, closing: Grammar, spelling: Spelling) -> None:
        self._limit, self._matcher, self._closing, self._spelling = limit, matcher, closing, spelling
        self._begin, self._end = limit.begin.encode(), limit.end.encode()
        self._text: bytes | None = b""
        """What is written of the tag at the beginning, then the last bytes of thinking; None: it is over."""
        self._is_thinking = not self._begin
        self._num_tokens = 0
        self._close_if_due()

    def fill(self, bits: NDArray[np.int32], row: int) -> None:
        """As `Matcher`."""
        self._matcher.fill(bits, row)

    def forced(self) -> list[int]:
        """As `Matcher`. While there is thinking to come, its tokens are counted one by one."""
        return self._matcher.forced() if self._text is None else []

    def accept(self, token_id: int) -> None:
        """As `Matcher`."""
        self._matcher.accept(token_id)
        if self._text is None:
            return
        self._text += self._spelling.token_bytes[token_id]
        if self._is_thinking:
            self._num_tokens += 1
        elif self._text.startswith(self._begin):
            self._is_thinking, self._text = True, self._text[len(self._begin) :]
        elif not self._begin.startswith(self._text):
            self._text = None
            return
        self._close_if_due()

    def _close_if_due(self) -> None:
        if not self._is_thinking or self._text is None:
            return
        if self._end in self._text:
            self._text = None
            return
        self._text = self._text[-len(self._end) :]
        if self._num_tokens >= self._limit.max_tokens:
            self._matcher = self._closing.matcher()
            for token_id in self._spelling.spell(self._written_of_end(self._text)):
                self._matcher.accept(token_id)
            self._text = None

    def _written_of_end(self, text: bytes) -> str:
        """The longest beginning of the end that `text` ends with."""
        beginnings = (self._limit.end[:length] for length in range(len(self._limit.end) - 1, 0, -1))
        return next((each for each in beginnings if text.endswith(each.encode())), "")
