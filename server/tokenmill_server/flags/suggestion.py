"""The name that a misspelt one was probably meant to be."""

import difflib
from collections.abc import Iterable


def suggestion(name: str, candidates: Iterable[str]) -> str:
    """`; did you mean x?` with the closest known name in the spelling of `name`, or an empty text."""
    key = name.lstrip("-").replace("-", "_").lower()
    close = difflib.get_close_matches(key, list(candidates), n=1, cutoff=0.6)
    if not close:
        return ""
    if name.startswith("-"):
        return f"; did you mean --{close[0].replace('_', '-')}?"
    return f"; did you mean {close[0].replace('_', '-') if '-' in name else close[0]}?"
