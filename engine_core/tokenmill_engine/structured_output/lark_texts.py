"""Texts as llguidance's Lark spells them."""

import json
from collections.abc import Iterable
from typing import Any

import llguidance

from tokenmill_engine.structured_output.grammar import NotExpressibleError


def literal(text: Any) -> str:
    """A constant. Raises NotExpressibleError if it is no text."""
    if not isinstance(text, str):
        raise NotExpressibleError("a text is none")
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def literals(texts: Iterable[Any]) -> str:
    """One of several."""
    return " | ".join(map(literal, texts))


def regex_of(pattern: str) -> str:
    """A regex of all of a piece of text, as in JSON schemas, where \\d and \\w are of ASCII."""
    return f"/{llguidance.regex_to_lark(pattern, 'dw')}/"
