"""Calls that a grammar forces (`tool_choice` required, or the name of a function): nothing else is in the output."""

from tokenmill_server.parsing.events import Arguments, CallStart, Event
from tokenmill_server.parsing.json_calls import CallReader


class ForcedCallsParser:
    """Output that a grammar holds to a JSON list of calls."""

    tags: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._reader: CallReader | None = None

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        position = 0
        while position < len(text):
            if self._reader is None:
                if text[position] == "{":
                    self._reader = CallReader()
                else:
                    position += 1
                    continue
            position = self._reader.feed(text, position, events)
            if self._reader.done or self._reader.failed:
                self._reader = None
        return events

    def finish(self) -> list[Event]:
        return []


class ForcedArgumentsParser:
    """Output that a grammar holds to the arguments of one function."""

    tags: tuple[str, ...] = ()

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = False

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        if not self._started and text:
            self._started = True
            events.append(CallStart(self._name))
        if text:
            events.append(Arguments(text))
        return events

    def finish(self) -> list[Event]:
        return []
