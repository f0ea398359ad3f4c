"""The JSON schema that output has to follow where calls are forced."""

from collections.abc import Iterable, Mapping
from typing import Any

Schema = dict[str, Any]

_DEFINITIONS = ("$defs", "definitions")
_PLAIN_OBJECT: Schema = {"type": "object"}


def arguments_schema(parameters: Mapping[str, Any] | None) -> Schema:
    """Of the arguments of one function."""
    return {**_PLAIN_OBJECT, **parameters} if parameters else {**_PLAIN_OBJECT, "properties": {}}


def calls_schema(functions: Iterable[tuple[str, Mapping[str, Any] | None]], *, parallel: bool) -> Schema:
    """Of a list of one or more calls (exactly one unless `parallel`) of `functions`: names and their parameters.

    Definitions of the parameters move to the top, under names that are unique, and references follow them.
    """
    definitions: Schema = {}
    options = []
    for index, (name, parameters) in enumerate(functions):
        arguments, own = _moved(arguments_schema(parameters), index)
        definitions |= own
        options.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema: Schema = {"type": "array", "minItems": 1, "items": options[0] if len(options) == 1 else {"anyOf": options}}
    if not parallel:
        schema["maxItems"] = 1
    return {**schema, "$defs": definitions} if definitions else schema


def _moved(schema: Schema, index: int) -> tuple[Schema, Schema]:
    """The schema of a function's arguments for use within another one, and its definitions under their new names."""
    names = {
        f"#/{place}/{name}": f"tool{index}_{place.strip('$')}_{name}"
        for place in _DEFINITIONS
        for name in (schema[place] if isinstance(schema.get(place), dict) else ())
    }
    root = f"tool{index}"
    body = {key: value for key, value in schema.items() if key not in _DEFINITIONS}
    definitions = {
        new: _renamed(schema[place][name], names, root)
        for place in _DEFINITIONS
        for name in (schema[place] if isinstance(schema.get(place), dict) else ())
        if (new := names[f"#/{place}/{name}"])
    }
    moved = _renamed(body, names, root)
    if _refers_to_root(schema):
        return {"$ref": f"#/$defs/{root}"}, {**definitions, root: moved}
    return moved, definitions


def _renamed(value: Any, names: Mapping[str, str], root: str) -> Any:
    """With references to definitions, to what is in them, and to the root, as they are called now."""
    if isinstance(value, list):
        return [_renamed(each, names, root) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _new_reference(each, names, root)
        if key == "$ref" and isinstance(each, str)
        else _renamed(each, names, root)
        for key, each in value.items()
    }


def _new_reference(reference: str, names: Mapping[str, str], root: str) -> str:
    if not reference.startswith("#"):
        return reference
    place, _, rest = reference.removeprefix("#/").partition("/")
    name, _, inner = rest.partition("/")
    new = names.get(f"#/{place}/{name}")
    if new is None:
        return f"#/$defs/{root}" + reference.removeprefix("#")
    return f"#/$defs/{new}" + (f"/{inner}" if inner else "")


def _refers_to_root(value: Any) -> bool:
    """Whether something in a schema refers to it all, or to a part that is no definition."""
    if isinstance(value, list):
        return any(map(_refers_to_root, value))
    if not isinstance(value, dict):
        return False
    reference = value.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        return reference.removeprefix("#/").partition("/")[0] not in _DEFINITIONS
    return any(map(_refers_to_root, value.values()))
