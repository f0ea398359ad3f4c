"""What the output has to look like where only a part of it is to follow a grammar: after thinking, or in calls.

Said as structural tags (https://github.com/mlc-ai/xgrammar), of which engines make one grammar for the whole output.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill_engine.config.structured_output import MAX_WHITESPACE
from tokenmill_engine.errors import InvalidRequestError
from tokenmill_engine.messages import StructuredOutputsParams
from tokenmill_server.parsing.call_schema import arguments_schema
from tokenmill_server.parsing.reasoning import CLOSE, OPEN, Start
from tokenmill_server.processing.structured import older_format

Format = dict[str, Any]

_BREAKS: Format = {"type": "regex", "pattern": "\\n*"}
_TRIGGER = "<tool_call>"


@dataclass(frozen=True, slots=True)
class Functions:
    """What may be called."""

    schemas: Mapping[str, Any]
    """Of the arguments, by name."""
    strict: Sequence[str] = ()
    """Those whose schemas are to be followed in full."""


TAGGED_PARSERS = ("hermes", "qwen3_coder")
"""Parsers of calls that a grammar can tell from text while they are written."""


def after_thinking(
    wanted: StructuredOutputsParams | None, start: Start, max_tokens: int | None = None
) -> StructuredOutputsParams | None:
    """The same for an output that may begin with thinking, which it does not apply to. None: any text. `max_tokens`: as
    many are possible for thinking, then it ends.

    Raises InvalidRequestError for what can only be said of a whole output.
    """
    if start is Start.ANSWER or (wanted is None and max_tokens is None):
        return wanted
    text: Format = {"type": "any_text"}
    thought = text if max_tokens is None else {**text, "max_tokens": max_tokens}
    thinking: Format = {"type": "tag", "begin": "", "content": thought, "end": CLOSE}
    answer = text if wanted is None else format_of(wanted)
    if start is Start.TAG:
        thinking = {"type": "optional", "content": {**thinking, "begin": OPEN}}
        excludes = answer.get("excludes", [])
        # Else the tag could be a part of it.
        if answer.get("type") in ("any_text", "triggered_tags") and isinstance(excludes, list):
            answer = {**answer, "excludes": [*excludes, OPEN]}
    param = "thinking_token_budget" if wanted is None else wanted.param
    return _tag({"type": "sequence", "elements": [thinking, _BREAKS, answer]}, param)


def answer_or_calls(
    wanted: StructuredOutputsParams, parser: str, functions: Functions, *, parallel: bool
) -> StructuredOutputsParams:
    """The same, or calls of `functions`, as a model writes them that has the choice. `parser` is a tagged one. Schemas
    of functions that are not strict are followed as far as they are understood."""
    calls = {
        "type": "tags_with_separator",
        "tags": _call_tags(parser, functions.schemas, frozenset(functions.schemas) - frozenset(functions.strict)),
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    return _tag({"type": "or", "elements": [format_of(wanted), calls]}, wanted.param)


def text_with_calls(parser: str, functions: Functions, param: str) -> StructuredOutputsParams:
    """Any text, in which calls of `functions` have arguments that follow their schemas; those that are not strict are
    any object. `parser` is a tagged one."""
    schemas = {
        name: schema if name in functions.strict else {"additionalProperties": True}
        for name, schema in functions.schemas.items()
    }
    return _tag({"type": "triggered_tags", "triggers": [_TRIGGER], "tags": _call_tags(parser, schemas)}, param)


def format_of(wanted: StructuredOutputsParams) -> Format:
    """As a part of a structural tag. Raises InvalidRequestError for what cannot be one."""
    if wanted.structural_tag is not None:
        given = _read(wanted.structural_tag, wanted.param)
        if not isinstance(given, dict):
            raise InvalidRequestError("a structural tag must be a JSON object", wanted.param)
        return dict(given["format"]) if isinstance(given.get("format"), dict) else older_format(given)
    if wanted.json is not None:
        return _json_format(_read(wanted.json, wanted.param), wanted)
    if wanted.json_object:
        return _json_format({"type": "object", "additionalProperties": True}, wanted)
    if wanted.regex is not None:
        return {"type": "regex", "pattern": wanted.regex}
    if wanted.choice is not None:
        return {"type": "or", "elements": [{"type": "const_string", "value": choice} for choice in wanted.choice]}
    if wanted.grammar is not None and "::=" in wanted.grammar:
        return {"type": "grammar", "grammar": wanted.grammar}
    raise InvalidRequestError(
        "a grammar in Lark cannot follow thinking, nor stand beside calls of tools; write it in EBNF", wanted.param
    )


def _json_format(schema: Any, wanted: StructuredOutputsParams) -> Format:
    part: Format = {"type": "json_schema", "json_schema": schema}
    if wanted.whitespace_pattern is not None:
        part["whitespace_pattern"] = wanted.whitespace_pattern
    else:
        part["max_whitespace_cnt"] = 1 if wanted.disable_any_whitespace else MAX_WHITESPACE
    if wanted.disable_additional_properties is not None:
        part["additional_properties"] = not wanted.disable_additional_properties
    return part


def _read(value: Any, param: str) -> Any:
    """A JSON object, or the text of one."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise InvalidRequestError("it must be JSON", param) from None
    if not isinstance(value, dict | bool):
        raise InvalidRequestError("it must be a JSON object", param)
    return value


def _call_tags(parser: str, functions: Mapping[str, Any], lenient: Collection[str] = ()) -> list[Format]:
    tags = []
    for name, parameters in functions.items():
        content: Format = {"type": "json_schema", "json_schema": arguments_schema(parameters), "max_whitespace_cnt": 1}
        if parser == "qwen3_coder":
            begin: str = f"{_TRIGGER}\n<function={name}>\n"
            close = "</function>\n</tool_call>"
            end: str | list[str] = ["\n" + close, close]  # templates have no empty line where there are no arguments
            content["style"] = "qwen_xml"
        else:
            begin, end = (
                f'{_TRIGGER}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ',
                "}\n</tool_call>",
            )
        if name in lenient:
            content["lenient"] = True
        tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
    return tags


def _tag(content: Format, param: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": content}, param=param)
