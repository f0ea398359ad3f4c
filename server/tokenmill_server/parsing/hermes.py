"""Calls as Hermes, Qwen2.5 and Qwen3 write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from tokenmill_server.parsing.events import Event, may_become
from tokenmill_server.parsing.tagged_calls import TaggedCallParser

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_SEPARATORS = " \t\r\n,;[]"


class HermesParser(TaggedCallParser):
    """Several calls may share one pair of tags. Tags around something else are text."""

    tags = (_OPEN, _CLOSE)
    opening_tag = _OPEN

    def _opened(self, events: list[Event]) -> bool:
        return self._seek_call(_SEPARATORS, events)

    def _after_call(self, events: list[Event]) -> bool:
        """A brace too many is no text either."""
        self._buffer = self._buffer.lstrip(_SEPARATORS + "}")
        if self._buffer.startswith("{"):
            self._begin_call()
        elif self._buffer.startswith(_CLOSE):
            self._buffer, self._state = self._buffer.removeprefix(_CLOSE), self._in_text
        elif may_become(self._buffer, _CLOSE) or may_become(self._buffer, _OPEN):
            return False
        else:
            self._state = self._in_text
        return True
