"""What parsers of calls as JSON objects behind a tag have in common: text until the tag, and the object."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from tokenmill_server.parsing.events import Event, Text, held_back
from tokenmill_server.parsing.json_calls import CallReader


class TaggedCallParser(ABC):
    """A state machine whose states are methods: each takes what it can from the buffer, and says whether there is
    more to be taken."""

    opening_tag: ClassVar[str]

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

    @abstractmethod
    def _opened(self, events: list[Event]) -> bool:
        """Behind the tag."""

    @abstractmethod
    def _after_call(self, events: list[Event]) -> bool:
        """Behind a call, where another one, its end or text may come."""

    def _in_text(self, events: list[Event]) -> bool:
        before, tag, after = self._buffer.partition(self.opening_tag)
        if tag:
            self._buffer, self._opening, self._state = after, tag, self._opened
        else:
            cut = len(before) - held_back(before, (self.opening_tag,))
            before, self._buffer = before[:cut], before[cut:]
        if before:
            events.append(Text(before))
        return bool(tag)

    def _seek_call(self, separators: str, events: list[Event]) -> bool:
        """An object is to come, perhaps behind `separators`."""
        rest = self._buffer.lstrip(separators)
        self._opening += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = rest
        if rest.startswith("{"):
            self._begin_call()
        elif rest:
            self._give_up(self._opening, events)
        return bool(rest)

    def _begin_call(self) -> None:
        self._reader, self._state = CallReader(), self._in_call

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

    def _give_up(self, text: str, events: list[Event]) -> None:
        """It was `text` after all."""
        self._opening, self._reader, self._state = "", CallReader(), self._in_text
        if text:
            events.append(Text(text))
