"""What JSON schemas say, as far as the libraries differ in it.

xgrammar ignores some keywords, alone or beside others, and then lets through what the schema forbids. llguidance
refuses what it cannot do. So xgrammar gets the schemas that are made of what it is known to keep to.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

from tokenmill_engine.structured_output.grammar import GrammarError

Schema = Any
"""Parsed JSON."""

NOTES: Final = frozenset(
    ("title", "description", "default", "examples", "$schema", "$comment", "deprecated", "readOnly", "writeOnly")
)
"""Keywords for readers; `strict` and the like, which are none, as well."""
DEFINITIONS: Final = ("$defs", "definitions")
_KEPT: Final[Mapping[str, frozenset[str]]] = {
    "string": frozenset(),  # lengths and patterns let characters through that JSON does not allow
    "integer": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "object": frozenset(("properties", "required", "additionalProperties")),
    "boolean": frozenset(),
    "null": frozenset(),
}
_MAX_COUNTED: Final = 128
"""Characters that are counted: thousands take seconds to prepare."""
_LENGTHS: Final = ("minLength", "maxLength")
_NOT_OF_XGRAMMAR: Final = ("whitespace_pattern", "additional_properties", "lenient")
"""What a format of type `json_schema` says beyond what is xgrammar's."""
_SUBSCHEMAS: Final = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_LISTS_OF_SCHEMAS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS_OF_SCHEMAS: Final = ("properties", "patternProperties", "dependentSchemas", *DEFINITIONS)


def refuse_keywords(schema: Schema) -> None:
    """Raises GrammarError, with the reason, for a schema that xgrammar is not known to keep to."""
    if isinstance(schema, bool):
        if not schema:
            raise GrammarError("the schema false allows nothing")
        return
    if not isinstance(schema, dict):
        raise GrammarError("a JSON schema is an object or true")
    for name in DEFINITIONS:
        for definition in _mapping(schema.get(name, {}), name).values():
            refuse_keywords(definition)
    rules = {name: value for name, value in schema.items() if name not in NOTES and name not in DEFINITIONS}
    for name in ("$ref", "anyOf", "oneOf", "allOf", "enum", "const"):
        if name in rules:
            _check_alone(name, rules)
            return
    _check_type(rules)


def _check_alone(name: str, rules: dict[str, Any]) -> None:
    value = rules[name]
    beside = rules.keys() - {name}
    if name in ("enum", "const"):
        values = value if name == "enum" and isinstance(value, list) else [value]
        if any(isinstance(each, dict | list) for each in values):
            raise GrammarError(f"{name} has values that are objects or arrays")
        beside = beside if not _types_fit(values, rules.get("type")) else beside - {"type"}
    if beside:
        raise GrammarError(f"{name} stands beside {min(beside)}")
    if name == "allOf" and isinstance(value, list) and len(value) > 1:
        raise GrammarError("allOf has several schemas")
    if name in ("anyOf", "oneOf", "allOf"):
        if not isinstance(value, list) or not value:
            raise GrammarError(f"{name} must be a list of schemas")
        for each in value:
            refuse_keywords(each)
    if name == "$ref" and not (isinstance(value, str) and value.startswith("#")):
        raise GrammarError("$ref leads out of the schema")


def _types_fit(values: list[Any], kind: Any) -> bool:
    fits = {
        "string": lambda value: isinstance(value, str),
        "integer": lambda value: type(value) is int,
        "number": lambda value: type(value) in (int, float),
        "boolean": lambda value: isinstance(value, bool),
        "null": lambda value: value is None,
    }
    return isinstance(kind, str) and kind in fits and all(fits[kind](value) for value in values)


def _check_type(rules: dict[str, Any]) -> None:
    kind = rules.pop("type", None)
    if isinstance(kind, list):
        if rules:
            raise GrammarError(f"a list of types stands beside {min(rules)}")
        return
    if kind is None:
        kind = next((name for name in ("object", "array") if rules and rules.keys() <= _KEPT[name]), None)
        if kind is None:
            if rules:
                raise GrammarError(f"{min(rules)} has no type beside it")
            return
        if rules.keys() == {"required"}:
            raise GrammarError("required has no type beside it")
    foreign = rules.keys() - _KEPT.get(kind if isinstance(kind, str) else "", frozenset())
    if foreign:
        raise GrammarError(f"{min(foreign)} is not supported by xgrammar")
    _check_parts(rules)


def _check_parts(rules: dict[str, Any]) -> None:
    properties = _mapping(rules.get("properties", {}), "properties")
    required = rules.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) and name in properties for name in required):
        raise GrammarError("required names what is not among the properties")
    for part in properties.values():
        refuse_keywords(part)
    if rules.get("additionalProperties", False) is not False:
        refuse_keywords(rules["additionalProperties"])
    if rules.get("items", False) is not False:
        refuse_keywords(rules["items"])
    for part in rules.get("prefixItems", []):
        refuse_keywords(part)


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise GrammarError(f"{name} must be an object")
    return value


def with_closed_objects(schema: Schema) -> Schema:
    """`schema` in which objects that name properties have no others unless it says so. Left as it is where several
    schemas describe one object together: what one of them does not name another may."""
    return schema if _describes_together(schema) else _closed(schema)


def _describes_together(schema: Schema) -> bool:
    if isinstance(schema, list):
        return any(_describes_together(each) for each in schema)
    if not isinstance(schema, dict):
        return False
    together = "allOf" in schema or ("properties" in schema and schema.keys() & {"anyOf", "oneOf", "$ref", "if"})
    return bool(together) or any(_describes_together(each) for each in schema.values())


def _closed(schema: Schema) -> Schema:
    if not isinstance(schema, dict):
        return schema
    closed = _map_schemas(schema, _closed)
    names = closed.keys() & {"properties", "patternProperties"}
    if names and not closed.keys() & {"additionalProperties", "unevaluatedProperties"}:
        closed["additionalProperties"] = False
    return closed


def refuse_open_escape(regex: str) -> None:
    """Raises GrammarError for a last backslash that escapes nothing: libraries put something behind it."""
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise GrammarError("the regex ends with a backslash that escapes nothing")


def without_unknown_formats(schema: Schema, known: Collection[str]) -> Schema:
    """`schema` without `format` where it is none of `known`: JSON Schema allows any, as a note to the reader.

    Raises GrammarError for a pattern that ends in the middle.
    """
    if not isinstance(schema, dict):
        return schema
    for pattern in (schema.get("pattern"), *_mapping(schema.get("patternProperties", {}), "patternProperties")):
        if isinstance(pattern, str):
            refuse_open_escape(pattern)
    kept = _map_schemas(schema, lambda part: without_unknown_formats(part, known))
    if isinstance(kept.get("format"), str) and kept["format"] not in known:
        del kept["format"]
    return kept


def tag_for_xgrammar(tag: Any) -> Any:
    """A structural tag as xgrammar can keep to it: the lengths of strings in its JSON schemas are patterns, which else
    would let characters through that JSON does not allow.

    Raises GrammarError for what it would not keep to.
    """
    if isinstance(tag, list):
        return [tag_for_xgrammar(each) for each in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") != "json_schema":
        return {name: tag_for_xgrammar(value) for name, value in tag.items()}
    if tag.get("whitespace_pattern") is not None:
        raise GrammarError("xgrammar knows no whitespace_pattern")
    part = {name: value for name, value in tag.items() if name not in _NOT_OF_XGRAMMAR}
    if tag.get("style", "json") != "json":
        return part
    schema = tag.get("json_schema")
    if not tag.get("lenient"):
        refuse_keywords(_without_lengths(schema))
    if isinstance(schema, dict) and tag.get("additional_properties"):
        schema = {"additionalProperties": True, **schema}
    return {**part, "json_schema": _with_patterns(schema)}


def _without_lengths(schema: Schema) -> Schema:
    """Without those that `_with_patterns` can say."""
    if not isinstance(schema, dict):
        return schema
    changed = _map_schemas(schema, _without_lengths)
    if schema.get("type") == "string" and "pattern" not in schema and _are_short(schema):
        for name in _LENGTHS:
            changed.pop(name, None)
    return changed


def _with_patterns(schema: Schema) -> Schema:
    if not isinstance(schema, dict):
        return schema
    changed = _map_schemas(schema, _with_patterns)
    if not changed.keys() & set(_LENGTHS):
        return changed
    least, most = changed.pop("minLength", 0), changed.pop("maxLength", None)
    if _are_short(schema) and "pattern" not in changed:
        changed["pattern"] = f'^[^"\\\\\\x00-\\x1f]{{{least},{"" if most is None else most}}}$'
    return changed


def _are_short(schema: Schema) -> bool:
    return all(type(schema[name]) is int and 0 <= schema[name] <= _MAX_COUNTED for name in _LENGTHS if name in schema)


def _map_schemas(schema: dict[str, Any], change: Any) -> dict[str, Any]:
    """A copy in which the schemas directly within are changed."""
    changed = dict(schema)
    for name, value in schema.items():
        if name in _SUBSCHEMAS:
            changed[name] = change(value)
        elif name in _LISTS_OF_SCHEMAS and isinstance(value, list):
            changed[name] = [change(each) for each in value]
        elif name in _MAPS_OF_SCHEMAS and isinstance(value, dict):
            changed[name] = {key: change(each) for key, each in value.items()}
    return changed
