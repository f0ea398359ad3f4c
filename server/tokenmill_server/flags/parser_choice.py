"""Which parsers the output of the served model gets."""

from tokenmill_engine.errors import ConfigError
from tokenmill_server.flags.values import FlagValues
from tokenmill_server.parsing.registry import guess_reasoning_parser, guess_tool_parser


def resolve_parsers(values: FlagValues, template: str | None) -> dict[str, str | None]:
    """Fields of the server's configuration, with `auto` resolved by the chat template.

    Raises ConfigError if somebody asks for a parser that the template does not tell.
    """
    return {
        "tool_call_parser": _resolve(values, "tool_call_parser", guess_tool_parser(template)),
        "reasoning_parser": _resolve(values, "reasoning_parser", guess_reasoning_parser(template)),
    }


def _resolve(values: FlagValues, key: str, guess: str | None) -> str | None:
    value: str = values[key]
    if value == "auto" and guess is None and values.is_given(key):
        raise ConfigError(f"{values.stated(key)}: the model's chat template shows none that is known; name one")
    return guess if value == "auto" else None if value == "none" else value
