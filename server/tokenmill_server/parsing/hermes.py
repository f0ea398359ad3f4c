"""Calls as Hermes, Qwen2.5 and Qwen3 write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from collections.abc import Callable

from tokenmill_server.parsing.events import Event, Text, held_back, may_become
from tokenmill_server.parsing.json_calls import CallReader

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_SEPARATORS = " \t\r\n,;[]"


class HermesParser:
    """Several calls may share one pair of tags. Tags around something else are text."""

    tags = (_OPEN, _CLOSE)

    def __init__(self) -> None:
        self._buffer = ""
        self._state: Callable[[list[Event]], bool] = self._in_text
        self._reader = CallReader()
        self._opening = ""
        """The tag and what followed, while that may be text."""

    def push(self, text: str) -> list[Event]:
        self._buffer += text
        events: list[Event] = []
        while self._buffer and self._state(events):
            pass
        return events

    def finish(self) -> list[Event]:
        held = self._opening + ("" if self._reader.started else self._reader.raw) + self._buffer
        self._buffer = self._opening = ""
        return [Text(held)] if held and self._state != self._after_call else []

    def _in_text(self, events: list[Event]) -> bool:
        before, tag, after = self._buffer.partition(_OPEN)
        if tag:
            self._buffer, self._opening, self._state = after, _OPEN, self._opened
        else:
            cut = len(before) - held_back(before, (_OPEN,))
            before, self._buffer = before[:cut], before[cut:]
        if before:
            events.append(Text(before))
        return bool(tag)

    def _opened(self, events: list[Event]) -> bool:
        rest = self._buffer.lstrip(_SEPARATORS)
        self._opening += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = rest
        if rest.startswith("{"):
            self._reader, self._state = CallReader(), self._in_call
        elif rest:
            self._give_up(self._opening, events)
        return bool(rest)

    def _in_call(self, events: list[Event]) -> bool:
        end = self._reader.feed(self._buffer, 0, events)
        self._buffer = self._buffer[end:]
        if self._reader.started:
            self._opening = ""
        if self._reader.failed:
            self._give_up(self._opening + self._reader.raw, events)
        elif self._reader.done:
            self._state = self._after_call
        return bool(self._buffer)

    def _after_call(self, events: list[Event]) -> bool:
        """A brace too many is no text either."""
        self._buffer = self._buffer.lstrip(_SEPARATORS + "}")
        if self._buffer.startswith("{"):
            self._reader, self._state = CallReader(), self._in_call
        elif self._buffer.startswith(_CLOSE):
            self._buffer, self._state = self._buffer.removeprefix(_CLOSE), self._in_text
        elif may_become(self._buffer, _CLOSE) or may_become(self._buffer, _OPEN):
            return False
        else:
            self._state = self._in_text
        return True

    def _give_up(self, text: str, events: list[Event]) -> None:
        self._opening, self._reader, self._state = "", CallReader(), self._in_text
        if text:
            events.append(Text(text))
