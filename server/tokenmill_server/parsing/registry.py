"""Parsers by the names that flags have for them, and which one a chat template asks for."""

from collections.abc import Callable, Mapping
from typing import Any

from tokenmill_server.parsing.events import ToolParser
from tokenmill_server.parsing.hermes import HermesParser
from tokenmill_server.parsing.llama3_json import Llama3JsonParser
from tokenmill_server.parsing.mistral import MistralParser
from tokenmill_server.parsing.parameters import ToolSchemas
from tokenmill_server.parsing.pythonic import PythonicParser
from tokenmill_server.parsing.qwen3_coder import Qwen3CoderParser

Schemas = Mapping[str, Any]
"""Parameters by the names of functions."""

TOOL_PARSERS: dict[str, Callable[[Schemas], ToolParser]] = {
    "hermes": lambda _: HermesParser(),
    "llama3_json": lambda schemas: Llama3JsonParser(frozenset(schemas)),
    "mistral": lambda _: MistralParser(),
    "pythonic": lambda schemas: PythonicParser(ToolSchemas(schemas), frozenset(schemas)),
    "qwen3_coder": lambda schemas: Qwen3CoderParser(ToolSchemas(schemas)),
}
TOOL_PARSER_ALIASES = {
    "qwen3_xml": "qwen3_coder",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
}
"""vLLM's names for the same formats."""

TOOL_TAGS: dict[str, tuple[str, ...]] = {
    "hermes": HermesParser.tags,
    "llama3_json": (),
    "mistral": MistralParser.tags,
    "pythonic": (),
    "qwen3_coder": Qwen3CoderParser.tags,
}
"""What a parser must see of the output even where it is a special token."""

REASONING_PARSERS = ("deepseek_r1", "qwen3")
ALWAYS_THINKS = frozenset({"deepseek_r1"})
"""Output that says nothing else begins with thinking."""

_TOOL_MARKS = (
    ("mistral", ("[TOOL_CALLS]",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("func_name1(params_name1=",)),
    ("llama3_json", ('{"name": ', '"parameters": ', "ipython")),
)


def guess_tool_parser(template: str | None) -> str | None:
    """The parser of the calls that a chat template writes; None if it writes none that is known."""
    if template is None or "tools" not in template:
        return None
    return next((name for name, marks in _TOOL_MARKS if all(mark in template for mark in marks)), None)


def guess_reasoning_parser(template: str | None) -> str | None:
    """The parser of the thinking that a chat template knows of."""
    if template is None or "</think>" not in template:
        return None
    return "deepseek_r1" if "<｜Assistant｜>" in template else "qwen3"
