"""Members of a JSON flag as flags of their own, as vLLM takes them: `--limit-mm-per-prompt.image 2`."""

import json
from collections.abc import Collection, Sequence
from typing import Any

from tokenmill_engine.errors import ConfigError


def join_dotted(arguments: Sequence[str], names: Collection[str]) -> list[str]:
    """`arguments`, in which the flags `--NAME.MEMBER VALUE` and `--NAME.MEMBER.MEMBER=VALUE` of each NAME in `names`,
    which is written with dashes, have become one `--NAME JSON` at the end.

    A value that is not JSON is text. Members keep their spelling, names may have underscores.

    Raises ConfigError for a flag without a member or a value, and for members that contradict each other.
    """
    kept: list[str] = []
    found: dict[str, dict[str, Any]] = {}
    rest = iter(arguments)
    for argument in rest:
        flag, equals, value = argument.partition("=")
        head, dot, members = flag.partition(".")
        name = head.removeprefix("--").replace("_", "-")
        if not (dot and head.startswith("--") and name in names):
            kept.append(argument)
            continue
        text = value if equals else next(rest, None)
        if text is None or not all(members.split(".")):
            raise ConfigError(f"{flag} must be --{name}.MEMBER VALUE, the same as --{name} '{{\"MEMBER\": VALUE}}'")
        _put(found.setdefault(name, {}), members.split("."), _value(text), flag)
    for name, members_of_name in found.items():
        kept += [f"--{name}", json.dumps(members_of_name)]
    return kept


def _put(owner: dict[str, Any], members: Sequence[str], value: Any, flag: str) -> None:
    *parents, last = members
    for parent in parents:
        owner = owner.setdefault(parent, {})
        if not isinstance(owner, dict):
            raise ConfigError(f"{flag} contradicts another value of {parent!r}; leave one out")
    if owner.setdefault(last, value) != value:
        raise ConfigError(f"{flag} is given with different values; keep one")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
