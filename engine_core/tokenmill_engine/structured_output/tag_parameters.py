"""Arguments that are written one by one, `<parameter=name>value</parameter>` (style `qwen_xml`), in llguidance's terms.

Strings are written as they are, all other values as JSON. Arguments come in the schema's order.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from tokenmill_engine.structured_output.grammar import NotExpressibleError
from tokenmill_engine.structured_output.lark_texts import literal, literals
from tokenmill_engine.structured_output.schemas import DEFINITIONS, NOTES

Schema = Any

_CLOSE: Final = "</parameter>"
_SPACE: Final = "/[ \\n\\r\\t]?/"
_NAME: Final = "/[^<>\\n]+/"
_OF_ROOT: Final = frozenset(("type", "properties", "required", "additionalProperties", "strict"))
_OF_STRINGS: Final = frozenset(("type", "enum", "const", "minLength", "maxLength"))
_MAX_REFERENCES: Final = 8
_MAX_LENGTH: Final = 100_000


def lark_of_parameters(
    schema: Schema, name: Callable[[str, bool], str], json: Callable[[Schema], str], *, has_others: bool
) -> str:
    """The body of a rule. `name` takes the text of a lexeme (True) or a rule, and says what it is called; `json` writes
    a schema in Lark. `has_others`: what the schema does not say of other arguments.

    Raises NotExpressibleError.
    """
    if not isinstance(schema, dict) or not schema.keys() <= _OF_ROOT | NOTES | set(DEFINITIONS):
        raise NotExpressibleError("llguidance has no such arguments that are written one by one")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    others = schema.get("additionalProperties", has_others or (not properties and "properties" not in schema))
    if not isinstance(properties, dict) or not isinstance(required, list) or not isinstance(others, bool):
        raise NotExpressibleError("llguidance has no such arguments that are written one by one")
    if not all(isinstance(each, str) and each in properties for each in required):
        raise NotExpressibleError("required names what is not among the properties")
    arguments = []
    for argument, value in properties.items():
        head = name(f"{_SPACE} {literal(f'<parameter={argument}>')}", True)
        rule = name(f"{head} {_value(value, schema, name, json)}", False)
        arguments.append(rule if argument in required else f"({rule})?")
    if others:
        head = name(f'{_SPACE} "<parameter=" {_NAME} ">"', True)
        arguments.append(f"({head} {name(_until_close('ANY'), True)})*")
    return " ".join(arguments) or '""'


def _value(
    schema: Schema, root: Mapping[str, Any], name: Callable[[str, bool], str], json: Callable[[Any], str]
) -> str:
    """With the tag behind it."""
    branches = list(_branches(schema, root, _MAX_REFERENCES))
    texts = [branch for branch in branches if _may_be_text(branch)]
    if any(not branch.keys() - NOTES - {"type"} for branch in texts):
        return name(_until_close("ANY"), True)
    if not texts:
        _check_references(schema)
        definitions = {place: root[place] for place in DEFINITIONS if place in root}
        close = name(f"{_SPACE} {literal(_CLOSE)}", True)
        return f"{name(_SPACE, True)} {json({**schema, **definitions})} {close}"
    if len(texts) < len(branches) or len(texts) > 1:
        raise NotExpressibleError("llguidance has no values that are texts of some kind or something else")
    return name(_until_close(_text(texts[0])), True)


def _text(schema: Mapping[str, Any]) -> str:
    """A string that is not just any."""
    if schema.keys() - NOTES - _OF_STRINGS or schema.get("type", "string") != "string":
        raise NotExpressibleError("llguidance has no such strings without quotes")
    lengths = [schema.get("minLength", 0), schema.get("maxLength", 0)]
    if not all(type(length) is int and 0 <= length <= _MAX_LENGTH for length in lengths):
        raise NotExpressibleError("lengths must be numbers")
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
            raise NotExpressibleError("values of several types")
        if len(schema.keys() & _OF_STRINGS - {"type"}) > 1:
            raise NotExpressibleError("values with a length")
        return literals(values)
    most = lengths[1] if "maxLength" in schema else ""
    return f"/(?s:.){{{lengths[0]},{most}}}/"


def _until_close(text: str) -> str:
    """One line break on each side is no part of the text."""
    close = literal(_CLOSE)
    return f"(/\\n?/ ({text}) /\\n?/ {close}) & ~(ANY {close} SOME)"


def _branches(schema: Schema, root: Mapping[str, Any], depth: int) -> Iterator[dict[str, Any]]:
    """Schemas of which one holds. References are followed where nothing stands beside them."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict) or depth == 0:
        raise NotExpressibleError("a schema is none, or refers to itself")
    rules = schema.keys() - NOTES
    reference = schema.get("$ref")
    if rules == {"$ref"} and isinstance(reference, str):
        place, _, target = reference.removeprefix("#/").partition("/")
        definitions = root.get(place) if place in DEFINITIONS else None
        if not isinstance(definitions, dict) or target not in definitions:
            raise NotExpressibleError("a reference that leads elsewhere")
        yield from _branches(definitions[target], root, depth - 1)
        return
    for several in ("anyOf", "oneOf"):
        if rules == {several} and isinstance(schema[several], list):
            for each in schema[several]:
                yield from _branches(each, root, depth - 1)
            return
    if isinstance(schema.get("type"), list):
        for kind in schema["type"]:
            yield {**schema, "type": kind}
        return
    if "type" not in schema and isinstance(schema.get("enum"), list):
        texts = [value for value in schema["enum"] if isinstance(value, str)]
        if texts and len(texts) < len(schema["enum"]):
            raise NotExpressibleError("values of several types")
        yield {**schema, "type": "string" if texts else "none"}
        return
    if "type" not in schema and "const" in schema:
        yield {**schema, "type": "string" if isinstance(schema["const"], str) else "none"}
        return
    if "type" not in schema and rules:
        raise NotExpressibleError("a schema without a type")
    yield schema


def _may_be_text(branch: Mapping[str, Any]) -> bool:
    return bool(branch.get("type", "string") == "string")


def _check_references(schema: Schema) -> None:
    """Raises NotExpressibleError for one to a part of the schema that is no definition."""
    if isinstance(schema, list):
        for each in schema:
            _check_references(each)
    elif isinstance(schema, dict):
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.removeprefix("#/").partition("/")[0] not in DEFINITIONS:
            raise NotExpressibleError("a reference that leads elsewhere")
        for each in schema.values():
            _check_references(each)
