"""What tools declare of their parameters, for formats that write values without types."""

import ast
import json
from collections.abc import Iterable, Mapping
from typing import Any

_MAX_DEPTH = 8
"""Of references and alternatives that are followed for the types of a parameter."""


class ToolSchemas:
    """The parameters of functions by name, as JSON schemas that nobody has checked."""

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self._functions = functions

    def names(self, function: str) -> list[str]:
        """The parameters of `function` in the order declared."""
        return list(self._properties(function))

    def types(self, function: str, parameter: str) -> frozenset[str] | None:
        """JSON types that a parameter may have: `{"string"}` for one that is not declared, None where anything goes."""
        properties = self._properties(function)
        if parameter not in properties:
            return frozenset({"string"})
        root = self._functions.get(function)
        return frozenset(_types(properties[parameter], root, _MAX_DEPTH)) or None

    def _properties(self, function: str) -> Mapping[str, Any]:
        schema = self._functions.get(function)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        return properties if isinstance(properties, dict) else {}


def _types(schema: Any, root: Any, depth: int) -> Iterable[str]:
    if not isinstance(schema, dict) or depth == 0:
        return
    declared = schema.get("type")
    if isinstance(declared, str):
        yield declared
    elif isinstance(declared, list):
        yield from (each for each in declared if isinstance(each, str))
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else ():
            yield from _types(option, root, depth - 1)
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]]
        yield from {_type_of(value) for value in values} if declared is None else ()
    if isinstance(schema.get("$ref"), str):
        yield from _types(_resolve(schema["$ref"], root), root, depth - 1)


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def _resolve(reference: str, root: Any) -> Any:
    """What a reference within the same schema names."""
    target = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
    return target


def convert(text: str, types: frozenset[str] | None) -> str:
    """JSON of a value that is written without quotes, as the first of its types that it can be; else as a string."""
    wanted = {"null", "boolean", "integer", "number", "object", "array"} if types is None else types - {"string"}
    value, found = _read(text.strip())
    if found and (_type_of(value) in wanted or (type(value) is int and "number" in wanted)):
        return json.dumps(value, ensure_ascii=False)
    if "integer" in wanted and isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(text, ensure_ascii=False)


_WORDS = {"true": True, "false": False, "null": None, "none": None}


def _read(text: str) -> tuple[Any, bool]:
    """The value that `text` is in JSON, or in Python, and whether it is one."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()], True
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text)
            json.dumps(value, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        return (list(value) if isinstance(value, tuple) else value), True
    return None, False
