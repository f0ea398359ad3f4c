"""`tools` and `tool_choice` of a chat, checked."""

from dataclasses import dataclass
from typing import Any

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_server.processing.shown import shown
from tokenmill_server.processing.structured import MAX_NESTING, nesting

Json = dict[str, Any]

MAX_TOOLS = 1024
_MAX_NAME_CHARS = 256
_CHOICES = ("none", "auto", "required")
_KINDS = "none, auto, required or an object that names a function or those that are allowed"


@dataclass(slots=True, frozen=True)
class ToolUse:
    """What a request says of tools. It has some."""

    tools: list[Json]
    """As the client sent them, those that it allows."""
    places: tuple[int, ...]
    """Of each in the request."""
    choice: str
    """`none`, `auto`, `required` or `named`."""
    function: str | None
    """The one that is named."""
    parallel: bool
    as_functions: bool = False
    """The client knows functions, and at most one call of them."""

    @property
    def field(self) -> str:
        """Of the request, where they are."""
        return "functions" if self.as_functions else "tools"

    @property
    def is_forced(self) -> bool:
        """Whether the output is calls, whatever the model would like."""
        return self.choice in ("required", "named")

    @property
    def strict(self) -> list[tuple[int, str]]:
        """Places and names of the functions whose calls are to follow their schemas."""
        functions = [tool["function"] for tool in self.tools]
        return [(place, each["name"]) for place, each in zip(self.places, functions, strict=True) if each.get("strict")]

    @property
    def schemas(self) -> dict[str, Any]:
        """Parameters by the names of functions."""
        return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}


def read_tool_use(tools: list[Json] | None, choice: str | Json | None, parallel: bool | None) -> ToolUse | None:
    """None if the request has no tools.

    Raises InvalidRequestError naming the field that is malformed, or contradicts another.
    """
    if choice is not None and not isinstance(choice, dict) and choice not in _CHOICES:
        raise InvalidRequestError(f"tool_choice must be {_KINDS}, got {shown(choice)}", "tool_choice")
    if not tools:
        if choice == "none":
            return None
        if tools is not None:
            raise InvalidRequestError("tools must not be empty; leave it out for none", "tools")
        if choice is not None:
            raise InvalidRequestError("tool_choice needs tools", "tool_choice")
        return None
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"tools has {len(tools)} entries, more than the limit of {MAX_TOOLS}", "tools")
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tools[{index}]")
    places = tuple(range(len(tools)))
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, places = _allowed_tools(choice, tools)
    function = _named_function(choice, tools) if isinstance(choice, dict) else None
    kind = "named" if function is not None else str(choice or "auto")
    return ToolUse([tools[place] for place in places], places, kind, function, parallel is not False)


def _check_tool(tool: Json, path: str) -> None:
    kind = tool.get("type", "function")
    if kind != "function":
        raise InvalidRequestError(f"tools are of type function, got {shown(kind)}", f"{path}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequestError(f"a tool has a function, an object; got {shown(function)}", f"{path}.function")
    path = f"{path}.function"
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME_CHARS or not name.isprintable():
        raise InvalidRequestError(
            f"the name of a function has 1 to {_MAX_NAME_CHARS} printable characters, got {shown(name)}", f"{path}.name"
        )
    for key, types, what in (
        ("description", str, "text"),
        ("parameters", dict, "a JSON schema of an object"),
        ("strict", bool, "true or false"),
    ):
        if function.get(key) is not None and not isinstance(function[key], types):
            raise InvalidRequestError(f"{key} must be {what}, got {shown(function[key])}", f"{path}.{key}")
    if nesting(function.get("parameters")) > MAX_NESTING:
        raise InvalidRequestError(f"parameters are nested more than {MAX_NESTING} levels deep", f"{path}.parameters")
    declared = (function.get("parameters") or {}).get("type", "object")
    if declared != "object":
        raise InvalidRequestError(
            f"parameters must be a schema of type object, got {shown(declared)}", f"{path}.parameters.type"
        )


def _allowed_tools(choice: Json, tools: list[Json]) -> tuple[str, tuple[int, ...]]:
    """How tools are chosen, and the places of those that may be."""
    path = "tool_choice.allowed_tools"
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required"):
        raise InvalidRequestError(
            'tool_choice allows tools as {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}, '
            "with the mode auto or required",
            f"{path}.mode",
        )
    chosen = allowed.get("tools")
    if not isinstance(chosen, list) or not 0 < len(chosen) <= MAX_TOOLS:
        raise InvalidRequestError(f"the allowed tools are a list of 1 to {MAX_TOOLS}", f"{path}.tools")
    names = [tool["function"]["name"] for tool in tools]
    wanted = {_allowed_name(tool, names, f"{path}.tools[{index}]") for index, tool in enumerate(chosen)}
    return allowed["mode"], tuple(place for place, name in enumerate(names) if name in wanted)


def _allowed_name(tool: Any, names: list[str], path: str) -> str:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type", "function") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in names:
        raise InvalidRequestError(f"an allowed tool names a function that is in tools, got {shown(tool)}", path)
    return name


def _named_function(choice: Json, tools: list[Json]) -> str:
    kind = choice.get("type", "function")
    if kind != "function":
        raise InvalidRequestError(f"tool_choice may name a function, got the type {shown(kind)}", "tool_choice.type")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequestError(
            'tool_choice names a function as {"type": "function", "function": {"name": "..."}}',
            "tool_choice.function.name",
        )
    if all(tool["function"]["name"] != name for tool in tools):
        raise InvalidRequestError(f"tool_choice names {shown(name)}, which is not in tools", "tool_choice")
    return name
