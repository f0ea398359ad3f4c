"""Calls as Mistral's models write them: `[TOOL_CALLS]` and a JSON list of objects with `name` and `arguments`, or,
since tokenizer version 11, `[TOOL_CALLS]name[ARGS]{...}` for each call (perhaps with a `[CALL_ID]` between)."""

from tokenmill_server.parsing.events import CallStart, Event, may_become
from tokenmill_server.parsing.json_calls import ArgumentsReader
from tokenmill_server.parsing.tagged_calls import TaggedCallParser

_CALLS = "[TOOL_CALLS]"
_ARGS = "[ARGS]"
_CALL_ID = "[CALL_ID]"
_SEPARATORS = " \t\r\n,;]"
_MAX_NAME_CHARS = 256


class MistralParser(TaggedCallParser):
    """What follows the tag and is neither is text."""

    tags = (_CALLS, _ARGS, _CALL_ID)
    opening_tag = _CALLS

    def __init__(self) -> None:
        super().__init__()
        self._arguments = ArgumentsReader()

    def _opened(self, _events: list[Event]) -> bool:
        """A list of objects, one object, or the name of a function."""
        rest = self._buffer.lstrip()
        if rest:
            self._opening += self._buffer[: len(self._buffer) - len(rest)]
            self._buffer = rest
            self._state = self._in_list if rest[0] in "[{" else self._in_name
        return bool(rest)

    def _in_list(self, events: list[Event]) -> bool:
        return self._seek_call("[" + _SEPARATORS, events)

    def _in_name(self, events: list[Event]) -> bool:
        cut = next((index for index, character in enumerate(self._buffer) if character in "[{"), None)
        name = self._buffer[:cut].strip()
        if len(name) > _MAX_NAME_CHARS or "\n" in name:
            self._give_up(self._opening, events)
            return True
        if cut is None:
            return False
        rest = self._buffer[cut:]
        if rest.startswith("["):
            if any(may_become(rest, tag) for tag in (_ARGS, _CALL_ID)):
                return False
            before, tag, rest = rest.partition(_ARGS)
            if (before and not before.startswith(_CALL_ID)) or len(before) > _MAX_NAME_CHARS:
                self._give_up(self._opening, events)
                return True
            if not tag or not rest.strip():
                return False
            rest = rest.lstrip()
        events.append(CallStart(name))
        self._buffer, self._opening = rest, ""
        self._arguments, self._state = ArgumentsReader(), self._in_arguments
        return True

    def _in_arguments(self, events: list[Event]) -> bool:
        end = self._arguments.feed(self._buffer, 0, events)
        self._buffer = self._buffer[end:]
        if self._arguments.scanner.done:
            self._state = self._after_call
        return bool(self._buffer)

    def _after_call(self, _events: list[Event]) -> bool:
        self._buffer = self._buffer.lstrip(_SEPARATORS)
        if self._buffer.startswith("{"):
            self._begin_call()
        elif may_become(self._buffer, _CALLS):
            return False
        else:
            self._state = self._in_text
        return True
