"""Calls as Llama 3.2 and 4 write them: a list of Python calls with literals, `[get_weather(city="Paris"), now()]`."""

import ast
import json
import re
from typing import Any

from tokenmill_server.parsing.events import Arguments, CallStart, Event
from tokenmill_server.parsing.line_start import LineStartParser
from tokenmill_server.parsing.parameters import ToolSchemas

_START, _END = "<|python_start|>", "<|python_end|>"
_SPACE = " \t\r\n"
_NAME = re.compile(r"[A-Za-z_][\w.\-]*")

_ARGUMENT = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)(.*)", re.DOTALL)
_MARKS = re.compile(r"""["'\\(){}\[\],]""")
_MAX_NAME_CHARS = 256


class PythonicParser(LineStartParser):
    """A list is one of calls if its first element calls a declared tool; any other is text."""

    tags = (_START, _END)

    def __init__(self, schemas: ToolSchemas, names: frozenset[str]) -> None:
        super().__init__("[", (_START, _END))
        self._schemas = schemas
        self._names = names
        self._name = ""
        self._num_arguments = 0
        self._num_calls = 0
        self._argument = ""
        """The part of an argument that has been read."""
        self._quote = ""
        self._depth = 0

    def _begin(self) -> None:
        self._num_calls, self._state = 0, self._before_call

    def _held(self) -> str:
        return ""

    def finish(self) -> list[Event]:
        if self._state == self._in_argument or (self._num_calls and self._state == self._before_call):
            self._buffer = ""  # the end of a call that has begun
        return super().finish()

    def _before_call(self, events: list[Event]) -> bool:
        """The buffer begins with a bracket, or after a call with what separates it from the next."""
        rest = self._buffer.lstrip(_SPACE + ("," if self._num_calls else ""))
        if self._num_calls == 0:
            rest = rest.removeprefix("[").lstrip(_SPACE)
        elif rest.startswith("]"):
            self._buffer, self._state = rest.removeprefix("]"), self._at_line_start
            return True
        match = _NAME.match(rest)
        name = "" if match is None else match[0]
        after = rest[len(name) :].lstrip(_SPACE)
        if not after and (not rest or name) and len(name) <= _MAX_NAME_CHARS:
            return False
        if not after.startswith("(") or name not in self._names:
            opening, self._buffer = (self._buffer, "") if self._num_calls else ("[", self._buffer[1:])
            self._give_up(opening, events)
            return True
        self._buffer = after.removeprefix("(")
        self._name, self._num_arguments, self._argument = name, 0, ""
        self._num_calls += 1
        self._state = self._in_argument
        events.append(CallStart(name))
        return True

    def _in_argument(self, events: list[Event]) -> bool:
        """Up to a comma or the closing bracket that belongs to the call itself."""
        position = 0
        while (match := _MARKS.search(self._buffer, position)) is not None:
            mark, position = match[0], match.end()
            if self._quote:
                if mark == "\\":
                    if position == len(self._buffer):  # what it escapes is not here yet
                        position -= 1
                        break
                    position += 1
                elif mark == self._quote:
                    self._quote = ""
            elif mark in "\"'":
                self._quote = mark
            elif mark in "({[":
                self._depth += 1
            elif mark == "," and self._depth == 0:
                self._take(position, events, "")
                return True
            elif mark in ")}]" and self._depth == 0:
                self._take(position, events, "}")
                self._state = self._before_call
                return True
            elif mark in ")}]":
                self._depth -= 1
        else:
            position = len(self._buffer)
        self._argument += self._buffer[:position]
        self._buffer = self._buffer[position:]
        return False

    def _take(self, end: int, events: list[Event], closing: str) -> None:
        """One argument ends before `end`."""
        argument, self._argument = self._argument + self._buffer[: end - 1], ""
        self._buffer = self._buffer[end:]
        if not argument.strip():
            events.append(Arguments(closing if self._num_arguments or not closing else "{}"))
            return
        match = _ARGUMENT.fullmatch(argument)
        names = self._schemas.names(self._name)
        key, value = (
            (match[1], match[2])
            if match is not None
            else (
                names[self._num_arguments] if self._num_arguments < len(names) else f"arg{self._num_arguments}",
                argument,
            )
        )
        separator = ", " if self._num_arguments else "{"
        self._num_arguments += 1
        events.append(Arguments(f"{separator}{json.dumps(key)}: {_json_of(value.strip())}{closing}"))


def _json_of(source: str) -> str:
    """JSON of a Python literal; words of JSON count as well. Anything else is a string with its own text."""
    try:
        return json.dumps(_value(ast.parse(source, mode="eval").body), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return json.dumps(source, ensure_ascii=False)


_WORDS = {"true": True, "false": False, "null": None}


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case _:
            return ast.literal_eval(node)


def _key(node: ast.expr | None) -> Any:
    if node is None:
        raise ValueError("a dictionary is unpacked")
    return ast.literal_eval(node)
