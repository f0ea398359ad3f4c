"""The text of one choice of a chat, split into thinking, answer and calls while it comes."""

import string
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from random import SystemRandom
from typing import Any

from tokenmill_server.parsing.events import Arguments, CallStart, Event, Text, ToolParser
from tokenmill_server.parsing.reasoning import ReasoningSplitter

Json = dict[str, Any]

_random = SystemRandom()


@dataclass(slots=True)
class CallPart:
    """What is new of one call."""

    index: int
    id: str | None = None
    """With the beginning of a call, as its name."""
    name: str | None = None
    arguments: str = ""

    def add(self, other: "CallPart") -> None:
        """What came later of the same call."""
        self.arguments += other.arguments

    def body(self) -> Json:
        """As an entry of `tool_calls` of a delta."""
        if self.id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        return {"index": self.index, **self.message_body()}

    def function_body(self) -> Json:
        """As `function_call` of a delta, or of a message."""
        name = {} if self.id is None else {"name": self.name}
        return {**name, "arguments": self.arguments}

    def message_body(self) -> Json:
        """As an entry of `tool_calls` of a message. It is a whole call."""
        return {
            "id": self.id,
            "type": "function",
            "function": self.function_body(),
        }


@dataclass(slots=True)
class ChatDelta:
    """What is new of a choice."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallPart] = field(default_factory=list)
    """By index."""

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def add(self, other: "ChatDelta") -> None:
        """What came later."""
        self.content += other.content
        self.reasoning += other.reasoning
        for part in other.calls:
            if self.calls and self.calls[-1].index == part.index:
                self.calls[-1].add(part)
            else:
                self.calls.append(part)


def long_call_id() -> str:
    """vLLM's ids of calls."""
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


def short_call_id() -> str:
    """Mistral's templates take nine letters and digits."""
    return "".join(_random.choices(string.ascii_letters + string.digits, k=9))


class ChatOutput:
    """Of one choice. White space beside calls is dropped."""

    def __init__(
        self,
        splitter: ReasoningSplitter | None,
        parser: ToolParser | None,
        *,
        max_calls: int | None = None,
        new_id: Callable[[], str] = long_call_id,
    ) -> None:
        """`max_calls`: later ones are dropped. No `parser`: calls are not looked for."""
        self.num_calls = 0
        self._splitter = splitter
        self._parser = parser
        self._max_calls = max_calls
        self._new_id = new_id
        self._held_space = ""
        self._has_content = self._after_call = self._dropping = False

    def push(self, text: str) -> ChatDelta:
        """What is certain after `text` more."""
        delta = ChatDelta()
        if self._splitter is not None:
            delta.reasoning, text = self._splitter.push(text)
        if text:
            self._take_answer(text, delta)
        return delta

    def finish(self) -> ChatDelta:
        """What was held back, at the end of the output."""
        delta = ChatDelta()
        if self._splitter is not None:
            delta.reasoning, text = self._splitter.finish()
            if text:
                self._take_answer(text, delta)
        if self._parser is not None:
            self._take(self._parser.finish(), delta)
            delta.content += self._held_space
            self._held_space = ""
        return delta

    def _take_answer(self, text: str, delta: ChatDelta) -> None:
        if self._parser is None:
            delta.content += text
        else:
            self._take(self._parser.push(text), delta)

    def _take(self, events: list[Event], delta: ChatDelta) -> None:
        for event in events:
            match event:
                case Text(text):
                    self._take_text(text, delta)
                case CallStart(name):
                    name = _whole(name)
                    self._held_space, self._after_call = "", True
                    self._dropping = self._max_calls is not None and self.num_calls >= self._max_calls
                    if not self._dropping:
                        delta.add(ChatDelta(calls=[CallPart(self.num_calls, self._new_id(), name)]))
                        self.num_calls += 1
                case Arguments(text):
                    if text and not self._dropping:
                        delta.add(ChatDelta(calls=[CallPart(self.num_calls - 1, arguments=_whole(text))]))

    def _take_text(self, text: str, delta: ChatDelta) -> None:
        if self._after_call:
            text = text.lstrip()
            if not text:
                return
            self._after_call = False
            self._held_space = "\n" if self._has_content else ""
        text = self._held_space + text
        shown = text.rstrip()
        self._held_space = text[len(shown) :]
        self._has_content = self._has_content or bool(shown)
        delta.content += shown


def _whole(text: str) -> str:
    """Without halves of characters: models can write them in JSON, but no answer can hold them."""
    return text if text.isascii() else text.encode(errors="replace").decode()
