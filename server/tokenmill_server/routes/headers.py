"""Headers of a request, looked up in what the HTTP server passes on: a few comparisons, where the framework makes an
object of all headers first."""

import re

from fastapi import Request

from tokenmill_engine.errors import InvalidRequestError

_MAX_LISTED_NUMBERS = 4
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")


def header(request: Request, name: bytes, default: str = "") -> str:
    """The first value of the header with this name, which is in lower case."""
    for key, value in request.scope["headers"]:
        if key == name:
            return bytes.decode(value, "latin-1")
    return default


def integer_header(request: Request, name: str) -> int | None:
    """The value of a header; it may be there twice, with the same one. Raises InvalidRequestError naming it."""
    wanted = name.lower().encode()
    texts = [value.decode("latin-1") for key, value in request.scope["headers"] if key == wanted]
    if not texts:
        return None
    for text in texts:
        if _INTEGER.fullmatch(text) is None:
            raise InvalidRequestError(f"the header {name} must be an integer, got {text[:100]!r}", name)
    numbers = {int(text) for text in texts}
    if len(numbers) > 1:
        values = ", ".join(str(number) for number in sorted(numbers)[:_MAX_LISTED_NUMBERS])
        raise InvalidRequestError(f"the header {name} contradicts itself, got {values}; send one", name)
    return numbers.pop()
