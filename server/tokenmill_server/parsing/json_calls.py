"""Reads calls written as JSON, `{"name": ..., "arguments": {...}}`, while they are generated.

Arguments are passed on as the model wrote them, but for line breaks in strings, which JSON has not. Models make
mistakes: brackets are counted, not checked.
"""

import json
import re
from collections.abc import Callable, Container

from tokenmill_server.parsing.events import Arguments, CallStart, Event

_ARGUMENT_KEYS = ("arguments", "parameters")
_IN_STRING = re.compile(r'["\\]')
_IN_CONTAINER = re.compile(r'["{}\[\]<]')
_AFTER_SCALAR = re.compile(r"[,}\]<;\s]")
_CONTROL = re.compile(r"[\x00-\x1f]")
_SPACE = " \t\r\n"


class ValueScanner:
    """Finds the end of one JSON value."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_kind", "broken", "done")

    def __init__(self) -> None:
        self._kind = ""
        self._depth = 0
        self._in_string = self._escaped = False
        self.done = False
        self.broken = False
        """It ended where a tag begins, in the midst of it."""

    @property
    def within(self) -> tuple[bool, bool]:
        """Whether it is in a string, and behind a backslash there."""
        return self._in_string, self._escaped

    @property
    def is_container(self) -> bool:
        """Whether it is an object or a list; known after its first character."""
        return self._kind == "container"

    def scan(self, text: str, start: int) -> int:
        """Where in `text` the value ends, or the end of `text`. The first character is the first of the value."""
        if not self._kind and start < len(text):
            first = text[start]
            self._kind = "string" if first == '"' else "container" if first in "{[" else "scalar"
        if self._kind == "scalar":
            match = _AFTER_SCALAR.search(text, start)
            self.done = match is not None
            return len(text) if match is None else match.start()
        position = start
        while position < len(text) and not self.done:
            position = self._in_text(text, position) if self._in_string else self._between(text, position)
        return position

    def _in_text(self, text: str, position: int) -> int:
        if self._escaped:
            self._escaped = False
            return position + 1
        match = _IN_STRING.search(text, position)
        if match is None:
            return len(text)
        if match[0] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.done = self._depth == 0
        return match.end()

    def _between(self, text: str, position: int) -> int:
        match = _IN_CONTAINER.search(text, position)
        if match is None:
            return len(text)
        if match[0] == '"':
            self._in_string = True
        elif match[0] == "<":  # no JSON: the tag that ends the call
            self.done = self.broken = True
            return match.start()
        else:
            self._depth += 1 if match[0] in "{[" else -1
            self.done = self._depth <= 0
        return match.end()


class ArgumentsReader:
    """The value that is the arguments: passed on as it comes if it is an object, else at its end. A string is taken for
    JSON in quotes, null for no arguments."""

    __slots__ = ("_pieces", "scanner")

    def __init__(self) -> None:
        self.scanner = ValueScanner()
        self._pieces: list[str] = []

    def feed(self, text: str, start: int, events: list[Event]) -> int:
        """Reads on at `start`; returns where it stopped."""
        state = self.scanner.within
        end = self.scanner.scan(text, start)
        if self.scanner.is_container:
            if end > start:
                piece = text[start:end]
                events.append(Arguments(piece if _CONTROL.search(piece) is None else _mended(piece, *state)))
        else:
            self._pieces.append(text[start:end])
            if self.scanner.done:
                events.append(Arguments(_unquoted("".join(self._pieces))))
        return end


def _mended(piece: str, in_string: bool, escaped: bool) -> str:
    """With line breaks and the like in strings as JSON writes them: models forget to."""
    characters: list[str] = []
    for character in piece:
        if in_string and character < " ":
            character = json.dumps(character)[2 if escaped else 1 : -1]
            escaped = False
        elif escaped:
            escaped = False
        elif in_string and character == "\\":
            escaped = True
        elif character == '"':
            in_string = not in_string
        characters.append(character)
    return "".join(characters)


def _unquoted(value: str) -> str:
    if value == "null":
        return "{}"
    if value.startswith('"'):
        try:
            return str(json.loads(value, strict=False)) or "{}"
        except ValueError:
            return value
    return value


class CallReader:
    """One call as a JSON object. `known` are the names that a call may have, None: any. It is a call once it has a
    name; if not `eager`, once it has arguments too, since an object with a name may be meant as text."""

    def __init__(self, known: Container[str] | None = None, *, eager: bool = True) -> None:
        self._known = known
        self._eager = eager
        self._state: Callable[[str, int, list[Event]], int] = self._before
        self._key = ""
        self._scanner = ValueScanner()
        self._reader: ArgumentsReader | None = None
        self._value: list[str] = []
        self._name: str | None = None
        self._early: list[Event] | None = None
        """Arguments that came before the name."""
        self._has_arguments = False
        self._raw: list[str] = []
        self.started = False
        self.done = False
        self.failed = False
        """It is no call. The character that showed it is not read."""

    @property
    def raw(self) -> str:
        """What was read of something that has not turned out to be a call."""
        return "".join(self._raw)

    def feed(self, text: str, start: int, events: list[Event]) -> int:
        """Reads on at `start`; returns where it stopped: at the end of `text` unless done or failed."""
        position = start
        while position < len(text) and not self.done and not self.failed:
            position = self._state(text, position, events)
        if not self.started:
            self._raw.append(text[start:position])
        return position

    def _before(self, text: str, position: int, _events: list[Event]) -> int:
        self.failed = text[position] != "{"
        self._state = self._between
        return position if self.failed else position + 1

    def _between(self, text: str, position: int, events: list[Event]) -> int:
        """Before a key, or the end."""
        character = text[position]
        if character == '"':
            self._scanner, self._value, self._state = ValueScanner(), [], self._in_key
            return position
        if character == "}":
            self._end(events)
        elif character not in _SPACE and character != ",":
            return self._break(position, events)
        return position + 1

    def _in_key(self, text: str, position: int, _events: list[Event]) -> int:
        end = self._scanner.scan(text, position)
        self._value.append(text[position:end])
        if self._scanner.done:
            self._key, self._state = _text_of("".join(self._value)) or "", self._colon
        return end

    def _colon(self, text: str, position: int, events: list[Event]) -> int:
        character = text[position]
        if character == ":":
            self._state = self._before_value
        elif character not in _SPACE:
            return self._break(position, events)
        return position + 1

    def _before_value(self, text: str, position: int, events: list[Event]) -> int:
        if text[position] in _SPACE:
            return position + 1
        self._scanner, self._value = ValueScanner(), []
        if self._key in _ARGUMENT_KEYS and not self._has_arguments:
            self._has_arguments = True
            self._reader, self._state = ArgumentsReader(), self._in_arguments
            if self._name is None:
                self._early = []
            else:
                self._start(events)
        else:
            self._state = self._in_value
        return position

    def _in_value(self, text: str, position: int, events: list[Event]) -> int:
        end = self._scanner.scan(text, position)
        self._value.append(text[position:end])
        if self._scanner.done:
            self._state = self._between
            if self._key == "name" and self._name is None:
                self._take_name(_text_of("".join(self._value)), events)
        return end

    def _in_arguments(self, text: str, position: int, events: list[Event]) -> int:
        assert self._reader is not None
        end = self._reader.feed(text, position, events if self._early is None else self._early)
        if self._reader.scanner.broken:
            return self._break(end, events)
        if self._reader.scanner.done:
            self._state = self._between
        return end

    def _take_name(self, name: str | None, events: list[Event]) -> None:
        if not name or (self._known is not None and name not in self._known):
            self.failed = True
            return
        self._name = name
        if self._eager or self._early is not None:
            self._start(events)
        if self._early is not None:
            events.extend(self._early)
            self._early = None

    def _start(self, events: list[Event]) -> None:
        if not self.started and self._name is not None:
            self.started = True
            self._raw.clear()
            events.append(CallStart(self._name))

    def _end(self, events: list[Event]) -> None:
        if self._name is None or not (self._eager or self._has_arguments):
            self.failed = True
            return
        self._start(events)
        if not self._has_arguments:
            events.append(Arguments("{}"))
        self.done = True

    def _break(self, position: int, events: list[Event]) -> int:
        """What comes is no JSON: the end of a call that has begun, else no call."""
        if self.started:
            self._end(events)
        else:
            self.failed = True
        return position


def _text_of(value: str) -> str | None:
    """The string that this is the JSON of."""
    try:
        text = json.loads(value, strict=False)
    except ValueError:
        return None
    return text if isinstance(text, str) else None
