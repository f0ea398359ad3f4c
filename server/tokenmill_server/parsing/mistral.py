"""Calls as Mistral's models write them: `[TOOL_CALLS]` and a JSON list of objects with `name` and `arguments`, or,
since tokenizer version 11, `[TOOL_CALLS]name[ARGS]{...}` for each call (perhaps with a `[CALL_ID]` between)."""

from collections.abc import Callable

from tokenmill_server.parsing.events import CallStart, Event, Text, held_back, may_become
from tokenmill_server.parsing.json_calls import ArgumentsReader, CallReader

_CALLS = "[TOOL_CALLS]"
_ARGS = "[ARGS]"
_CALL_ID = "[CALL_ID]"
_SEPARATORS = " \t\r\n,;]"
_MAX_NAME_CHARS = 256


class MistralParser:
    """What follows the tag and is neither is text."""

    tags = (_CALLS, _ARGS, _CALL_ID)

    def __init__(self) -> None:
        self._buffer = ""
        self._state: Callable[[list[Event]], bool] = self._in_text
        self._reader = CallReader()
        self._arguments = ArgumentsReader()
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
        before, tag, after = self._buffer.partition(_CALLS)
        if tag:
            self._buffer, self._opening, self._state = after, _CALLS, self._opened
        else:
            cut = len(before) - held_back(before, (_CALLS,))
            before, self._buffer = before[:cut], before[cut:]
        if before:
            events.append(Text(before))
        return bool(tag)

    def _opened(self, _events: list[Event]) -> bool:
        """A list of objects, one object, or the name of a function."""
        rest = self._buffer.lstrip()
        if rest:
            self._opening += self._buffer[: len(self._buffer) - len(rest)]
            self._buffer = rest
            self._state = self._in_list if rest[0] in "[{" else self._in_name
        return bool(rest)

    def _in_list(self, events: list[Event]) -> bool:
        rest = self._buffer.lstrip("[" + _SEPARATORS)
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
            self._reader, self._state = CallReader(), self._in_call
        elif may_become(self._buffer, _CALLS):
            return False
        else:
            self._state = self._in_text
        return True

    def _give_up(self, text: str, events: list[Event]) -> None:
        self._opening, self._reader, self._state = "", CallReader(), self._in_text
        if text:
            events.append(Text(text))
