"""`functions`, `function_call` and messages of the role `function`: what tools were called before they were tools.

A request with functions is one with tools of which at most one is called; only its answer is written the old way.
"""

from dataclasses import replace
from typing import Any

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_server.processing.shown import shown
from tokenmill_server.protocol.tools import ToolUse, read_tool_use

Json = dict[str, Any]

_CALL_ID = "function0"
"""Calls had no ids; each was answered before the next. Nine letters and digits, as some templates demand."""
_PARAMS = (
    ("tool_choice.function", "function_call"),
    ("tool_choice.type", "function_call"),
    ("tool_choice", "function_call"),
    ("].function", "]"),
    ("tools", "functions"),
)
"""What a field about tools is called among functions."""


def read_function_use(functions: list[Json] | None, choice: str | Json | None) -> ToolUse | None:
    """As `read_tool_use`. Raises InvalidRequestError naming the field that is malformed, or contradicts another."""
    if choice == "required":
        raise InvalidRequestError(
            f"function_call must be none, auto or an object that names a function, got {shown(choice)}", "function_call"
        )
    tools = None if functions is None else [{"type": "function", "function": function} for function in functions]
    try:
        use = read_tool_use(tools, {"function": choice} if isinstance(choice, dict) else choice, False)
    except InvalidRequestError as error:
        param = error.param or ""
        for new, old in _PARAMS:
            param = param.replace(new, old)
        raise InvalidRequestError(f"functions are taken as tools: {error}", param, error.code) from None
    return None if use is None else replace(use, as_functions=True)


def with_tool_calls(message: Json, path: str) -> Json:
    """A message of such a conversation as one of a conversation with tools; others as they are.

    Raises InvalidRequestError naming the field at `path` that is malformed.
    """
    call = message.get("function_call")
    if call is not None and message.get("role") == "assistant":
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise InvalidRequestError(
                f"function_call has the name of a function, and its arguments; got {shown(call)}",
                f"{path}.function_call",
            )
        if message.get("tool_calls"):
            raise InvalidRequestError("a message has function_call or tool_calls, not both", f"{path}.function_call")
        rest = {name: value for name, value in message.items() if name != "function_call"}
        return {**rest, "tool_calls": [{"id": _CALL_ID, "type": "function", "function": call}]}
    if message.get("role") == "function":
        if not isinstance(message.get("name"), str):
            raise InvalidRequestError("a message of the role function has the name of one", f"{path}.name")
        return {**message, "role": "tool", "tool_call_id": _CALL_ID}
    return message
