"""What parsers share that look for calls without tags: at the beginning of a line, after nothing but spaces."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from tokenmill_server.parsing.events import Event, Text, may_become

_SPACE = " \t\r\n"


class LineStartParser(ABC):
    """Text line by line; what a line begins with may be a call. `skipped` are tokens that may stand before one."""

    def __init__(self, opening: str, skipped: tuple[str, ...]) -> None:
        self._opening = opening
        self._skipped = skipped
        self._buffer = ""
        self._state: Callable[[list[Event]], bool] = self._at_line_start

    def push(self, text: str) -> list[Event]:
        self._buffer += text
        events: list[Event] = []
        while self._buffer and self._state(events):
            pass
        return events

    def finish(self) -> list[Event]:
        held = self._held() + self._buffer
        self._buffer = ""
        return [Text(held)] if held else []

    @abstractmethod
    def _begin(self) -> None:
        """The buffer begins with the opening, at the start of a line: what follows may be a call."""

    @abstractmethod
    def _held(self) -> str:
        """What was taken from the buffer and may still be text."""

    def _at_line_start(self, events: list[Event]) -> bool:
        rest = self._buffer.lstrip(_SPACE)
        if rest != self._buffer:
            events.append(Text(self._buffer[: len(self._buffer) - len(rest)]))
            self._buffer = rest
        for token in self._skipped:
            if rest.startswith(token):
                self._buffer = rest.removeprefix(token)
                return True
            if may_become(rest, token):
                return False
        if rest.startswith(self._opening):
            self._begin()
        else:
            self._state = self._in_text
        return True

    def _in_text(self, events: list[Event]) -> bool:
        line, newline, rest = self._buffer.partition("\n")
        events.append(Text(line + newline))
        self._buffer = rest
        if newline:
            self._state = self._at_line_start
        return bool(newline)

    def _give_up(self, text: str, events: list[Event]) -> None:
        """It was no call."""
        self._state = self._in_text
        if text:
            events.append(Text(text))
