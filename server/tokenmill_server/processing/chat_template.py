"""Renders a conversation with the model's own Jinja template, as transformers does, in a sandbox.

Knows nothing of HTTP or tokens. Messages are plain dicts `{"role": ..., "content": ..., ...}` with text content, or
with a list of parts where they have images.
"""

import json
import uuid
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenmill_engine.errors import ConfigError, InvalidRequestError
from tokenmill_server.processing.shown import shown
from tokenmill_server.processing.tool_history import HistoryShape, probe_shape

Message = dict[str, Any]

RESERVED_NAMES = frozenset({"self", "raise_exception", "strftime_now", *jinja2.defaults.DEFAULT_NAMESPACE})
"""What templates find without being given it: no variable may have such a name."""

_TEMPLATE_FAULTS = (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError)
_OF_LOOPS = frozenset({"first", "last", "index", "index0", "length", "nextitem", "previtem", "revindex", "revindex0"})
_PROBE = "tokenmill-probe"
_PROBE_LIST = [{"type": "text", "text": _PROBE}]


class ChatTemplate:
    """One compiled template and the special tokens it may print."""

    def __init__(self, source: str, bos_token: str | None = None, eos_token: str | None = None) -> None:
        """Raises ConfigError if `source` is not a Jinja template."""
        environment = _environment()
        self.source = source
        try:
            self._template = environment.from_string(source)
            self._template.globals = dict(self._template.globals)  # a chain of them is searched for each rendering
            self.variables = meta.find_undeclared_variables(environment.parse(source))
            """Names that the template reads from outside."""
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from error
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._knows_developer = "developer" in source
        self._needs_lists = False
        self._needs_lists = self._shows(_PROBE_LIST) and not self._shows(_PROBE)
        """It leaves out what is not in a list of parts, as templates of some models with images do."""

    def replaced(self, source: str) -> "ChatTemplate":
        """Another template for the same model. Raises ConfigError if `source` is none."""
        return ChatTemplate(source, self._tokens["bos_token"], self._tokens["eos_token"])

    def render(self, messages: list[Message], add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        """The prompt text. `variables` are visible to the template beside its own.

        Raises InvalidRequestError, with the template's own words, if the template rejects the conversation.
        """
        shown = messages if self._knows_developer else [_without_developer_role(message) for message in messages]
        if any(message.get("content") is None or message.get("tool_calls") is not None for message in shown):
            shown = [self._history_shape.fit(message) for message in shown]
        if self._needs_lists:
            shown = [_with_parts(message) for message in shown]
        given = {"messages": shown, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render({**self._tokens, **variables, **given})
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"the chat template rejects this conversation: {error}", "messages") from error
        except _TEMPLATE_FAULTS as error:
            raise InvalidRequestError(f"the chat template fails on this conversation: {error}", "messages") from error

    @cached_property
    def _history_shape(self) -> HistoryShape:
        return probe_shape(self._try)

    def _shows(self, content: Any) -> bool:
        """Whether a message with this content leaves a trace."""
        return _PROBE in (self._try([{"role": "user", "content": content}]) or "")

    def _try(self, messages: list[Message]) -> str | None:
        """The prompt; None if the template fails."""
        if self._needs_lists:
            messages = [_with_parts(message) for message in messages]
        try:
            return self._template.render({**self._tokens, "messages": messages, "add_generation_prompt": False})
        except (jinja2.TemplateError, *_TEMPLATE_FAULTS):
            return None

    def render_continuation(self, messages: list[Message], variables: Mapping[str, Any]) -> str:
        """The prompt that ends with exactly the text of the last message, so that generation carries it on.

        A mark is appended to the last message before rendering: whatever the template puts after it is cut off, and
        white space that the template strips is put back.
        """
        content = messages[-1].get("content")
        if not isinstance(content, str):
            raise InvalidRequestError("the message to continue has no text", "continue_final_message")
        mark = f"continue{uuid.uuid4().hex}"
        body = content.rstrip()
        marked = [*messages[:-1], {**messages[-1], "content": body + mark}]
        before, found, _ = self.render(marked, add_generation_prompt=False, variables=variables).rpartition(mark)
        if not found:
            raise InvalidRequestError("the chat template leaves out the message to continue", "continue_final_message")
        stripped = body.lstrip()
        if not before.endswith(body) and before.endswith(stripped):
            before = before[: len(before) - len(stripped)] + body
        return before + content[len(body) :]


def _without_developer_role(message: Message) -> Message:
    """OpenAI renamed the system role; templates that never heard of it see the old name."""
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def _with_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def text_of_message(message: Message) -> str:
    """All text of a message's content; none beside calls that have no content."""
    content = message["content"]
    if content is None:
        return ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Knows what templates ask of loops, which is most of what they ask, without looking it up."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return (type(obj) is LoopContext and attr in _OF_LOOPS) or super().is_safe_attribute(obj, attr, value)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant wrote, for training. Here: just its body."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, which is what models were trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format_string: str) -> str:
    return datetime.now().strftime(format_string)


TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts that are text, and where each has it."""


def text_of_content(content: Any, path: str) -> str | None:
    """Text of a message's content: a string, or a list of text parts, which are joined by newlines.

    Raises InvalidRequestError naming the part at `path` for anything else.
    """
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError("content must be a string or a list of parts", path)
    texts: list[str] = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise InvalidRequestError(
                f"a content part is an object with a 'type', got {shown(part)}", f"{path}[{index}].type"
            )
        if kind not in TEXT_PARTS:
            raise InvalidRequestError(
                f"content parts of type {shown(kind)} are not text",
                f"{path}[{index}].type",
                "unsupported_parameter",
            )
        key = TEXT_PARTS[kind]
        if not isinstance(part.get(key), str):
            raise InvalidRequestError(f"a text part needs a string in '{key}'", f"{path}[{index}].{key}")
        texts.append(part[key])
    return "\n".join(texts)
