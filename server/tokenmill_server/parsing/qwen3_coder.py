"""Calls as Qwen3-Coder writes them: tags around names and plain values,

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

The types of the values are those that the tool declares.
"""

import json
import re
from collections.abc import Callable

from tokenmill_server.parsing.events import Arguments, CallStart, Event, Text, held_back, may_become
from tokenmill_server.parsing.parameters import ToolSchemas, convert

_CALL = "<tool_call>"
_CALL_END = "</tool_call>"
_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"
_BAD_NAME = re.compile(r"[<\n]")
_VALUE_ENDS = (_PARAMETER_END, f"\n{_FUNCTION_END}\n{_CALL_END}", f"\n{_PARAMETER}")
"""Models forget the first now and then. The others are long enough to be no part of a value."""
_VALUE_END = re.compile("|".join(f"\n?{re.escape(tag)}" if tag == _PARAMETER_END else tag for tag in _VALUE_ENDS))


class Qwen3CoderParser:
    """`<tool_call>` may be missing; around something else than a function it is text."""

    tags = (_CALL, _CALL_END)

    def __init__(self, schemas: ToolSchemas) -> None:
        self._schemas = schemas
        self._buffer = ""
        self._state: Callable[[list[Event]], bool] = self._in_text
        self._opening = ""
        """The tag and what followed, while that may be text."""
        self._function = self._key = ""
        self._num_parameters = 0
        self._types: frozenset[str] | None = None
        self._value = ""
        """Of a parameter that is converted at its end."""
        self._at_value_start = False

    def push(self, text: str) -> list[Event]:
        self._buffer += text
        events: list[Event] = []
        while self._buffer and self._state(events):
            pass
        return events

    def finish(self) -> list[Event]:
        held, state = self._opening + self._buffer, self._state
        self._buffer = self._opening = ""
        if state == self._in_value and held:
            events: list[Event] = []
            ends = held.startswith("\n" + _FUNCTION_END)
            self._take_value("" if ends else held.removesuffix("\n"), events, ends=ends)
            return [*events, Arguments("}")] if ends else events
        return [Text(held)] if held and state in (self._in_text, self._opened, self._in_name) else []

    @property
    def _is_text(self) -> bool:
        return self._types == frozenset({"string"})

    def _in_text(self, events: list[Event]) -> bool:
        starts = {tag: start for tag in (_CALL, _FUNCTION) if (start := self._buffer.find(tag)) >= 0}
        if starts:
            tag = min(starts, key=lambda each: starts[each])
            before = self._buffer[: starts[tag]]
            self._buffer = self._buffer[starts[tag] + len(tag) :]
            self._opening, self._state = tag, self._opened if tag == _CALL else self._in_name
        else:
            cut = len(self._buffer) - held_back(self._buffer, (_CALL, _FUNCTION))
            before, self._buffer = self._buffer[:cut], self._buffer[cut:]
        if before:
            events.append(Text(before))
        return bool(starts)

    def _opened(self, events: list[Event]) -> bool:
        rest = self._buffer.lstrip()
        self._opening += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = rest
        if rest.startswith(_FUNCTION):
            self._buffer = rest.removeprefix(_FUNCTION)
            self._opening += _FUNCTION
            self._state = self._in_name
        elif not may_become(rest, _FUNCTION):
            self._give_up(events)
        return bool(self._buffer) and not may_become(rest, _FUNCTION)

    def _in_name(self, events: list[Event]) -> bool:
        name, end, rest = self._buffer.partition(">")
        if _BAD_NAME.search(name) or (end and not name.strip()):
            self._give_up(events)
            return True
        if end:
            self._function, self._num_parameters, self._opening = name.strip(), 0, ""
            self._buffer, self._state = rest, self._in_function
            events.append(CallStart(self._function))
        return bool(end)

    def _in_function(self, events: list[Event]) -> bool:
        """Between parameters. What is no tag is dropped."""
        self._buffer = self._buffer[self._buffer.find("<") :] if "<" in self._buffer else ""
        for tag in (_FUNCTION_END, _CALL_END):
            if self._buffer.startswith(tag):
                events.append(Arguments("}" if self._num_parameters else "{}"))
                self._buffer = self._buffer.removeprefix(tag)
                self._state = self._after_call if tag == _FUNCTION_END else self._in_text
                return True
        if self._buffer.startswith(_PARAMETER):
            key, end, rest = self._buffer.removeprefix(_PARAMETER).partition(">")
            if end:
                self._begin_parameter(key.strip(), events)
                self._buffer = rest
            return bool(end)
        if any(may_become(self._buffer, tag) for tag in (_FUNCTION_END, _CALL_END, _PARAMETER)):
            return False
        self._buffer = self._buffer[1:]
        return True

    def _begin_parameter(self, key: str, events: list[Event]) -> None:
        self._types = self._schemas.types(self._function, key)
        self._value, self._at_value_start = "", True
        separator = ", " if self._num_parameters else "{"
        quote = '"' if self._is_text else ""
        events.append(Arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: {quote}"))
        self._num_parameters += 1
        self._state = self._in_value

    def _in_value(self, events: list[Event]) -> bool:
        """One line break at each end belongs to the tags."""
        if self._at_value_start:
            self._buffer, self._at_value_start = self._buffer.removeprefix("\n"), False
        match = _VALUE_END.search(self._buffer)
        if match is not None:
            value, self._state = self._buffer[: match.start()], self._in_function
            self._buffer = self._buffer[match.end() if match[0].endswith(_PARAMETER_END) else match.start() :]
        else:
            cut = len(self._buffer) - held_back(self._buffer, (*_VALUE_ENDS, "\n" + _PARAMETER_END))
            value, self._buffer = self._buffer[:cut], self._buffer[cut:]
        self._take_value(value, events, ends=match is not None)
        return match is not None

    def _take_value(self, value: str, events: list[Event], *, ends: bool) -> None:
        if self._is_text:
            if value or ends:
                events.append(Arguments(_quoted(value) + ('"' if ends else "")))
        else:
            self._value += value
            if ends:
                events.append(Arguments(convert(self._value, self._types)))

    def _after_call(self, _events: list[Event]) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer.startswith(_CALL_END):
            self._buffer, self._state = self._buffer.removeprefix(_CALL_END), self._in_text
        elif may_become(self._buffer, _CALL_END):
            return False
        else:
            self._state = self._in_text
        return True

    def _give_up(self, events: list[Event]) -> None:
        events.append(Text(self._opening))
        self._opening, self._state = "", self._in_text


def _quoted(text: str) -> str:
    """How `text` is written between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
