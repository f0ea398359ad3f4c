"""Calls as Llama 3.1 and 3.2 write them: `{"name": ..., "parameters": {...}}`, several separated by semicolons."""

from collections.abc import Container

from tokenmill_server.parsing.events import Event
from tokenmill_server.parsing.json_calls import CallReader
from tokenmill_server.parsing.line_start import LineStartParser

_PYTHON_TAG = "<|python_tag|>"
_SEPARATORS = " \t\r\n;,"


class Llama3JsonParser(LineStartParser):
    """An object is a call if it names one of `names` and has arguments; any other is text."""

    tags = (_PYTHON_TAG,)

    def __init__(self, names: Container[str]) -> None:
        super().__init__("{", (_PYTHON_TAG,))
        self._names = names
        self._reader = CallReader()

    def _begin(self) -> None:
        self._reader, self._state = CallReader(self._names, eager=False), self._in_call

    def _held(self) -> str:
        return "" if self._reader.started else self._reader.raw

    def _in_call(self, events: list[Event]) -> bool:
        end = self._reader.feed(self._buffer, 0, events)
        self._buffer = self._buffer[end:]
        if self._reader.failed:
            raw, self._reader = self._reader.raw, CallReader()
            self._give_up(raw, events)
        elif self._reader.done:
            self._state = self._after_call
        return bool(self._buffer)

    def _after_call(self, _events: list[Event]) -> bool:
        self._buffer = self._buffer.lstrip(_SEPARATORS)
        if self._buffer:
            self._state = self._at_line_start
        return bool(self._buffer)
