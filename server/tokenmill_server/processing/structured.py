"""What the output must look like: from what users say to what engines read. Shared by the HTTP routes and `LLM`.

Checks what needs no grammar: whether it is JSON, how large and how deep it is. Whether it makes sense the engine says.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from tokenmill_engine.config.structured_output import StructuredOutputConfig
from tokenmill_engine.errors import InvalidRequestError
from tokenmill_engine.messages import StructuredKind, StructuredOutputsParams, StructuredSpec
from tokenmill_server.processing.shown import shown

MAX_NESTING = 64
MAX_CHARS = 262_144
"""Of a schema, a regex, a grammar or all choices."""
MAX_CHOICES = 10_000

_KINDS = tuple(kind.value for kind in StructuredKind)


def spec_of(given: StructuredOutputsParams, config: StructuredOutputConfig) -> StructuredSpec:
    """Raises InvalidRequestError for what is malformed, too large or too deep."""
    wanted = [kind for kind in StructuredKind if getattr(given, kind.value) is not None]
    if len(wanted) != 1:
        asked = f"got {' and '.join(wanted)}" if wanted else "got none"
        raise InvalidRequestError(f"exactly one of {', '.join(_KINDS)} is needed, {asked}", given.param)
    kind = wanted[0]
    is_json = kind in (StructuredKind.JSON, StructuredKind.JSON_OBJECT)
    if given.whitespace_pattern is not None and not is_json:
        raise InvalidRequestError("whitespace_pattern is for JSON alone", given.param)
    no_whitespace, no_others = given.disable_any_whitespace, given.disable_additional_properties
    return StructuredSpec(
        kind,
        _text_of(kind, getattr(given, kind.value), given.param),
        any_whitespace=config.any_whitespace if no_whitespace is None else not no_whitespace,
        additional_properties=config.additional_properties if no_others is None else not no_others,
        whitespace_pattern=given.whitespace_pattern,
        param=given.param,
    )


def _text_of(kind: StructuredKind, value: Any, param: str) -> str:
    match kind:
        case StructuredKind.JSON:
            text = _json_text(value, param)
        case StructuredKind.STRUCTURAL_TAG:
            text = _json_text(value, param, _tag_of)
        case StructuredKind.JSON_OBJECT:
            if value is not True:
                raise InvalidRequestError("json_object must be true if it is given", param)
            return ""
        case StructuredKind.CHOICE:
            text = _choices(value, param)
        case StructuredKind.REGEX | StructuredKind.GRAMMAR:
            text = value
    if not text:
        raise InvalidRequestError(f"{kind.value} must not be empty", param)
    if len(text) > MAX_CHARS:
        raise InvalidRequestError(f"{kind.value} has {len(text)} characters; {MAX_CHARS} are possible at most", param)
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON in a string can say that
        raise InvalidRequestError(f"{kind.value} has half a character (a lone surrogate)", param) from None
    return text


def _json_text(value: Any, param: str, convert: Callable[[Any], Any] = lambda value: value) -> str:
    """Of a schema or a structural tag, given as an object or as its text."""
    if isinstance(value, str):
        if len(value) > MAX_CHARS:
            return value
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise InvalidRequestError(f"it must be JSON, got {shown(value)}", param) from None
    if not isinstance(value, dict | bool):
        raise InvalidRequestError(f"it must be a JSON object, got {shown(value)}", param)
    if nesting(value) > MAX_NESTING:
        raise InvalidRequestError(f"it is nested more than {MAX_NESTING} levels deep", param)
    return json.dumps(convert(value), ensure_ascii=False)


def _tag_of(value: Any) -> Any:
    """A structural tag of the older form, with `structures` and `triggers`, in terms of the newer one."""
    if not isinstance(value, dict) or "structures" not in value or "format" in value:
        return value
    return {"type": "structural_tag", "format": older_format(value)}


def older_format(value: Mapping[str, Any]) -> dict[str, Any]:
    """The format of a structural tag with `structures` and `triggers`. What is malformed the library refuses."""
    structures = value.get("structures")
    tags = [
        {
            "begin": each.get("begin"),
            "content": {"type": "json_schema", "json_schema": each.get("schema", {})},
            "end": each.get("end"),
        }
        for each in (structures if isinstance(structures, list) else ())
        if isinstance(each, dict)
    ]
    return {"type": "triggered_tags", "triggers": value.get("triggers", []), "tags": tags}


def nesting(value: Any) -> int:
    """Levels of objects and arrays, as far as they matter: one more than are possible is enough."""
    level = [value]
    depth = 0
    while level and depth <= MAX_NESTING:
        children: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                children.extend(each.values())
            elif isinstance(each, list):
                children.extend(each)
        level = [each for each in children if isinstance(each, dict | list)]
        depth += 1
    return depth


def _choices(value: tuple[str, ...], param: str) -> str:
    if not value or not all(isinstance(choice, str) and choice for choice in value):
        raise InvalidRequestError("choice must be a list of texts that are not empty", param)
    if len(value) > MAX_CHOICES:
        raise InvalidRequestError(f"choice has {len(value)} entries; {MAX_CHOICES} are possible at most", param)
    return json.dumps(list(dict.fromkeys(value)), ensure_ascii=False)
