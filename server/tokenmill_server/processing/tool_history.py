"""Earlier calls of tools in a conversation: checked, and as a model's template takes them.

Clients send arguments as JSON in a string, and no content beside calls. Some templates expect objects and texts.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_server.processing.shown import shown

Message = dict[str, Any]

_PROBE = "tokenmill-probe"
_PROBE_CALL = {
    "id": "toolprobe",
    "type": "function",
    "function": {"name": "probe", "arguments": json.dumps({"key": _PROBE})},
}
_PROBE_HISTORY: list[Message] = [
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": None, "tool_calls": [_PROBE_CALL]},
    {"role": "tool", "tool_call_id": "toolprobe", "content": "!"},
]
_REASONING = ("reasoning", "reasoning_content")


def check_history(message: Message, path: str) -> Message:
    """A message, which may call tools, answer such a call, or have thinking; that under both of its names.

    Raises InvalidRequestError naming the field at `path` that is malformed.
    """
    for name in ("tool_calls", *_REASONING):
        if message.get(name) is not None and message["role"] != "assistant":
            raise InvalidRequestError(f"only messages of the assistant have {name}", f"{path}.{name}")
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise InvalidRequestError(f"tool_calls must be a list, got {shown(calls)}", f"{path}.tool_calls")
        for index, call in enumerate(calls):
            _check_call(call, f"{path}.tool_calls[{index}]")
    if message.get("tool_call_id") is not None and not isinstance(message["tool_call_id"], str):
        raise InvalidRequestError("tool_call_id must be text", f"{path}.tool_call_id")
    return {**message, **_thinking(message, path)}


def _check_call(call: Any, path: str) -> None:
    if not isinstance(call, dict):
        raise InvalidRequestError(f"a call is an object, got {shown(call)}", path)
    if call.get("type", "function") != "function":
        raise InvalidRequestError(f"calls are of type function, got {shown(call['type'])}", f"{path}.type")
    function = call.get("function")
    if not isinstance(function, dict):
        raise InvalidRequestError(f"a call has a function, an object; got {shown(function)}", f"{path}.function")
    if not isinstance(function.get("name"), str):
        raise InvalidRequestError("a call has the name of its function", f"{path}.function.name")
    if not isinstance(function.get("arguments"), str | dict | None):
        raise InvalidRequestError("arguments are JSON in a string", f"{path}.function.arguments")


def _thinking(message: Message, path: str) -> Message:
    """Templates know one of the two names."""
    for name in _REASONING:
        if message.get(name) is not None and not isinstance(message[name], str):
            raise InvalidRequestError(f"{name} must be text, got {shown(message[name])}", f"{path}.{name}")
    text = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return {} if text is None else dict.fromkeys(_REASONING, text)


@dataclass(slots=True, frozen=True)
class HistoryShape:
    """How a template takes calls."""

    takes_objects: bool = True
    """Arguments as objects, else as JSON in a string."""
    takes_no_content: bool = True
    """Null beside calls, else an empty text."""

    def fit(self, message: Message) -> Message:
        """The message as the template takes it."""
        calls = message.get("tool_calls")
        if message.get("content") is None and not (calls and self.takes_no_content):
            message = {**message, "content": ""}
        if calls is None:
            return message
        if not calls:
            return {name: value for name, value in message.items() if name != "tool_calls"}
        return {**message, "tool_calls": [self._fit_call(call) for call in calls]}

    def _fit_call(self, call: Any) -> Any:
        function = call["function"]
        arguments = function.get("arguments")
        if self.takes_objects and not isinstance(arguments, dict):
            arguments = _parsed(arguments or "{}")
        elif not self.takes_objects and not isinstance(arguments, str):
            arguments = json.dumps(arguments or {}, ensure_ascii=False)
        return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _parsed(arguments: str) -> Any:
    """Broken arguments, which a model may have written, stay as they are: it is to see them."""
    try:
        value = json.loads(arguments)
        if "\\u" in arguments:  # halves of characters are JSON, but no text
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError):
        return arguments


def probe_shape(render: Callable[[list[Message]], str | None]) -> HistoryShape:
    """How a template takes calls: by rendering one in each way. `render` returns None where the template fails."""
    for takes_objects in (True, False):
        for takes_no_content in (True, False):
            shape = HistoryShape(takes_objects, takes_no_content)
            text = render([shape.fit(message) for message in _PROBE_HISTORY])
            if text is not None and _PROBE in text and "None" not in text:
                return shape
    return HistoryShape(takes_no_content=False)
