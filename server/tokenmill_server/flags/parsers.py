"""From what a user wrote (text on the command line, a YAML scalar, a Python object) to a checked value.

A parser takes any object and returns the value, or raises ValueError with a phrase that completes "must be ...".
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

Parser = Callable[[Any], Any]

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<suffix>[kmgtKMGT]?)")
_SUFFIX_FACTORS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}
_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})


def parse_size(text: str) -> int:
    """A whole number with an optional suffix: k, m, g, t are decimal (and may follow a fraction, `1.5k`);
    K, M, G, T are powers of 1024.

    Raises:
        ValueError: the text is something else.
    """
    match = _SIZE.fullmatch(text.strip().replace("_", ""))
    if match is None:
        raise ValueError("a whole number such as 32768, 32k (32000) or 32K (32768)")
    number, suffix = match["number"], match["suffix"]
    if "." not in number:
        return int(number) * _SUFFIX_FACTORS[suffix]
    if not suffix.islower():
        raise ValueError("a whole number; a decimal point needs a lower-case suffix, such as 1.5k (1500)")
    value = float(number) * _SUFFIX_FACTORS[suffix]
    if not value.is_integer():
        raise ValueError("a whole number")
    return int(value)


def integer(minimum: int, maximum: int | None = None) -> Parser:
    """Whole numbers from `minimum` to `maximum`, both included; human sizes allowed."""
    limits = f"at least {minimum}" if maximum is None else f"{minimum} to {maximum}"
    wanted = f"a whole number, {limits}"

    def parse(value: object) -> int:
        if isinstance(value, str):
            try:
                number = _signed_size(value.strip())
            except ValueError as error:
                raise ValueError(f"{error}, {limits}") from None
        elif isinstance(value, float) and value.is_integer():
            number = int(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            number = value
        else:
            raise ValueError(wanted)
        if number < minimum or (maximum is not None and number > maximum):
            raise ValueError(wanted)
        return number

    return parse


def _signed_size(text: str) -> int:
    return -parse_size(text[1:]) if text.startswith("-") else parse_size(text)


def integer_list(minimum: int) -> Parser:
    """Whole numbers from `minimum` on: a list, or a text with commas between them."""
    parse_one = integer(minimum)

    def parse(value: object) -> tuple[int, ...]:
        items = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
        try:
            return tuple(parse_one(item) for item in items)
        except ValueError:
            raise ValueError(f"whole numbers from {minimum} on with commas between them, such as 4,6,4") from None

    return parse


def length_or_auto(value: object) -> int | str:
    """A number of tokens, or `auto` (also written -1)."""
    if value in ("auto", -1, "-1"):
        return "auto"
    try:
        return int(integer(1)(value))
    except ValueError:
        raise ValueError("a number of tokens such as 4096 or 32k, or auto") from None


def number(minimum: float, maximum: float, *, exclude_minimum: bool = False) -> Parser:
    """Finite real numbers in a range; the lower end is left out with `exclude_minimum`."""
    low = "above" if exclude_minimum else "at least"
    wanted = f"a number {low} {minimum:g}" + ("" if math.isinf(maximum) else f" and at most {maximum:g}")

    def parse(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(wanted)
        try:
            result = float(value)
        except ValueError:
            raise ValueError(wanted) from None
        below = result <= minimum if exclude_minimum else result < minimum
        if not math.isfinite(result) or below or result > maximum:
            raise ValueError(wanted)
        return result

    return parse


def text(value: object) -> str:
    """Any non-empty text."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        raise ValueError("a non-empty text")
    return value


def path_text(value: object) -> str:
    """Text, or an object with a file system path (`pathlib.Path`)."""
    if hasattr(value, "__fspath__"):
        value = value.__fspath__()
    return text(value)


def text_list(value: object) -> tuple[str, ...]:
    """One text or a list of them; repeated entries count once."""
    items = list(value) if isinstance(value, list | tuple) else [value]
    if not items:
        raise ValueError("one text or a list of them")
    return tuple(dict.fromkeys(text(item) for item in items))


def one_of(*choices: str, aliases: dict[str, str] | None = None, refused: dict[str, str] | None = None) -> Parser:
    """One of `choices`, in any case; `aliases` maps other spellings to them, `refused` has the reasons against values
    that users of vLLM may give."""
    spellings = {choice.lower(): choice for choice in choices} | (aliases or {})
    wanted = f"one of {', '.join(choices)}"

    def parse(value: object) -> str:
        if not isinstance(value, str) or value.lower() not in spellings:
            reason = (refused or {}).get(str(value).lower())
            raise ValueError(wanted if reason is None else f"{wanted} ({reason})")
        return spellings[value.lower()]

    return parse


def subset_of(*choices: str) -> Parser:
    """A comma-separated text or a list of different entries, each one of `choices`."""
    wanted = f"{' or '.join(choices)}, or both separated by a comma"

    def parse(value: object) -> tuple[str, ...]:
        entries: Sequence[object]
        if isinstance(value, str):
            entries = [entry.strip() for entry in value.split(",")]
        elif isinstance(value, list | tuple):
            entries = value
        else:
            raise ValueError(wanted)
        if not entries or any(entry not in choices for entry in entries):
            raise ValueError(wanted)
        return tuple(dict.fromkeys(str(entry) for entry in entries))

    return parse


def boolean(value: object) -> bool:
    """True or false."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    if isinstance(value, str):
        if value.strip().lower() in _TRUE:
            return True
        if value.strip().lower() in _FALSE:
            return False
    raise ValueError("true or false")
