"""`response_format` and `structured_outputs` of a request: two ways to say what the output must look like."""

from collections.abc import Mapping
from typing import Any

import msgspec

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_engine.messages import StructuredOutputsParams
from tokenmill_server.processing.shown import shown

_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_MEMBERS = frozenset(StructuredOutputsParams.__struct_fields__) - {"param"}


def structured_params(
    response_format: Mapping[str, Any] | None, structured_outputs: Mapping[str, Any] | None
) -> StructuredOutputsParams | None:
    """What both fields ask for. Raises InvalidRequestError if they contradict each other, or one is malformed."""
    by_format = _of_response_format(response_format) if response_format is not None else None
    if structured_outputs is None:
        return by_format
    if by_format is not None:
        raise InvalidRequestError(
            "response_format and structured_outputs both say what the output must look like; leave one out",
            "structured_outputs",
        )
    return _of_structured_outputs(structured_outputs)


def _of_response_format(given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """As OpenAI has it; structural tags as vLLM does."""
    kind = given.get("type")
    match kind:
        case "text":
            return None
        case "json_object":
            return StructuredOutputsParams(json_object=True, param="response_format")
        case "json_schema":
            return StructuredOutputsParams(json=_schema_of(given), param="response_format")
        case "structural_tag":
            return StructuredOutputsParams(structural_tag=dict(given), param="response_format")
    raise InvalidRequestError(f"type must be one of {', '.join(_FORMATS)}, got {shown(kind)}", "response_format.type")


def _schema_of(given: Mapping[str, Any]) -> dict[str, Any] | bool:
    described = given.get("json_schema")
    if not isinstance(described, dict):
        raise InvalidRequestError(
            "a response_format of type json_schema needs json_schema, an object", "response_format.json_schema"
        )
    schema = described.get("schema")
    if not isinstance(schema, dict | bool):
        raise InvalidRequestError("schema must be a JSON schema, an object", "response_format.json_schema.schema")
    return schema


def _of_structured_outputs(given: Mapping[str, Any]) -> StructuredOutputsParams:
    unknown = given.keys() - _MEMBERS
    if unknown:
        raise InvalidRequestError(
            f"{shown(min(unknown))} is not known; there are {', '.join(sorted(_MEMBERS))}", "structured_outputs"
        )
    try:
        return msgspec.convert(dict(given), StructuredOutputsParams)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(str(error), "structured_outputs") from None
