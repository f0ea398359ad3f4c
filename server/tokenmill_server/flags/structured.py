"""The row of the flag table about structured outputs."""

import json
from typing import Any

from tokenmill_engine.config.structured_output import StructuredOutputConfig
from tokenmill_server.flags.flag import Flag, Group

_EXAMPLE = '{"backend": "guidance"}'
_BACKENDS = ("auto", "xgrammar", "guidance")
_SWITCHES = ("disable_any_whitespace", "disable_additional_properties", "disable_jump_forward", "enable_in_reasoning")


def parse_structured(value: Any) -> StructuredOutputConfig:
    """From JSON, or from the mapping itself in Python and in config files. Raises ValueError saying what it must be."""
    if isinstance(value, StructuredOutputConfig):
        return value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError(f"an object such as {_EXAMPLE}") from None
    if not isinstance(value, dict):
        raise ValueError(f"an object such as {_EXAMPLE}")
    unknown = value.keys() - {"backend", *_SWITCHES}
    if unknown:
        raise ValueError(f"an object such as {_EXAMPLE}: {min(map(str, unknown))!r} is not known")
    backend = value.get("backend", "auto")
    if backend not in _BACKENDS:
        raise ValueError(f"an object whose backend is one of {', '.join(_BACKENDS)}")
    for name in _SWITCHES:
        if not isinstance(value.get(name, False), bool):
            raise ValueError(f"an object whose {name} is true or false")
    if value.get("enable_in_reasoning"):
        raise ValueError("an object whose enable_in_reasoning is false: there is no reasoning apart from the output")
    return StructuredOutputConfig(
        backend=backend,
        any_whitespace=not value.get("disable_any_whitespace", False),
        additional_properties=not value.get("disable_additional_properties", True),
        jump_forward=not value.get("disable_jump_forward", False),
    )


STRUCTURED = (
    Flag(
        "structured-outputs-config",
        Group.MODEL,
        parse_structured,
        None,
        "How outputs are made to follow a schema or grammar, as JSON: backend (auto, xgrammar or guidance, which is "
        "llguidance; auto takes that, and xgrammar for structural tags and EBNF), disable_jump_forward (true: "
        "text that has to follow is sampled token by token like any other), and what requests may say too: "
        "disable_any_whitespace, disable_additional_properties (false: objects may have properties that the schema "
        "does not name)",
        "engine.structured_output",
        metavar="JSON",
    ),
)
