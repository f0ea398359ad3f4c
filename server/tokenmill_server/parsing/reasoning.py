"""Splits what a model thinks, `<think>...</think>`, from what it answers. Tags and line breaks beside them are neither.

Templates end some prompts within the thinking, and others after it: the prompt says where the output begins.
"""

from collections.abc import Sequence
from enum import Enum

from tokenmill_server.parsing.events import held_back, may_become

OPEN = "<think>"
CLOSE = "</think>"

_BREAKS = "\r\n"


class Start(Enum):
    """Where an output begins."""

    THINKING = "thinking"
    """Within the thinking; its tag may come again."""
    ANSWER = "answer"
    TAG = "tag"
    """Before the tag, if the model thinks; else it answers."""


def start_after(prompt: str, *, always_thinks: bool) -> Start:
    """Where the output after `prompt` begins. `always_thinks`: a model that thinks also where nothing says so."""
    end = prompt.rstrip()
    if end.endswith(OPEN):
        return Start.THINKING
    if end.endswith(CLOSE):
        return Start.ANSWER
    return Start.THINKING if always_thinks else Start.TAG


def start_within(message: str) -> Start:
    """Where the output begins that goes on with `message` of the assistant."""
    if OPEN in message:
        return Start.ANSWER if CLOSE in message else Start.THINKING
    return Start.ANSWER if message.strip() else Start.TAG


class ReasoningSplitter:
    """Of one output."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._buffer = ""
        self._answers = start is Start.ANSWER
        self._at_start = not self._answers
        """Nothing but spaces has come, or a part of the tag."""
        self._skips_breaks = False

    def push(self, text: str) -> tuple[str, str]:
        """(thinking, answer) that are certain after `text` more."""
        self._buffer += text
        if self._at_start:
            self._look_for_tag()
        if self._at_start:
            return "", ""
        thinking = "" if self._answers else self._think()
        answer = ""
        if self._answers:
            answer, self._buffer = self._without_breaks(self._buffer), ""
        return thinking, answer

    def finish(self) -> tuple[str, str]:
        """What was held back."""
        held, self._buffer = self._buffer, ""
        if self._answers or (self._at_start and self._start is Start.TAG):
            return "", held
        return held.strip(_BREAKS) if self._at_start else held.rstrip(_BREAKS), ""

    def _look_for_tag(self) -> None:
        rest = self._buffer.lstrip()
        if not rest or may_become(rest, OPEN):
            return
        self._at_start = False
        if rest.startswith(OPEN):
            self._buffer, self._skips_breaks = rest.removeprefix(OPEN), True
        elif self._start is Start.TAG:
            self._answers = True
        else:
            self._skips_breaks = True

    def _think(self) -> str:
        before, tag, after = self._buffer.partition(CLOSE)
        if tag:
            thinking = self._without_breaks(before.rstrip(_BREAKS))
            self._buffer, self._answers, self._skips_breaks = after, True, True
            return thinking
        cut = len(before) - held_back(before, (CLOSE,))
        cut = len(before[:cut].rstrip(_BREAKS))
        self._buffer = before[cut:]
        return self._without_breaks(before[:cut])

    def _without_breaks(self, text: str) -> str:
        if self._skips_breaks:
            text = text.lstrip(_BREAKS)
            self._skips_breaks = not text
        return text


class ReasoningCounter:
    """Counts the tokens of one output that are thinking, with its tags. Looks at the bytes of tokens: text may lag
    behind them."""

    def __init__(self, start: Start, token_bytes: Sequence[bytes]) -> None:
        self._start = start
        self._table = token_bytes
        self._tail = b""
        self.decided = start is not Start.TAG
        """Whether it is known where the output begins."""
        self._counts = start is not Start.ANSWER
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Thinking tokens so far, the first ones; 0 while that is not known."""
        return self._num_tokens if self.decided else 0

    def count(self, token_ids: Sequence[int]) -> None:
        """Takes new tokens."""
        for token_id in token_ids:
            if not self._counts:
                break
            self._num_tokens += 1
            self._tail += self._table[token_id] if token_id < len(self._table) else b""
            if not self.decided:
                self._decide()
            elif CLOSE.encode() in self._tail:
                self._counts = False
            else:
                self._tail = self._tail[1 - len(CLOSE) :]

    def _decide(self) -> None:
        rest = self._tail.lstrip().decode(errors="replace")
        if rest and not may_become(rest, OPEN):
            self.decided = True
            self._counts = rest.startswith(OPEN)
            self._num_tokens = self._num_tokens if self._counts else 0
