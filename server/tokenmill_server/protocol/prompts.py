"""The four forms in which requests give texts."""

from typing import Any

from tokenmill_engine.errors import InvalidRequestError


def read_prompts(value: Any, param: str, max_prompts: int) -> list[str] | list[list[int]]:
    """A string, a list of strings, token ids, or a list of lists of token ids; `param` is the field that has it.

    Raises InvalidRequestError for anything else.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise InvalidRequestError(f"{param} must be a string, or a non-empty list of strings or token ids", param)
    if _all_integers(value):
        return [value]
    if len(value) > max_prompts:
        raise InvalidRequestError(f"at most {max_prompts} {param}s are allowed, got {len(value)}", param)
    if all(isinstance(entry, str) for entry in value) or all(
        isinstance(entry, list) and _all_integers(entry) for entry in value
    ):
        return value
    raise InvalidRequestError(f"{param} must hold only strings, only token ids, or only lists of token ids", param)


def _all_integers(values: list[Any]) -> bool:
    return set(map(type, values)) <= {int}
