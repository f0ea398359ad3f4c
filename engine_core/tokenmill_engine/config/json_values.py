"""Values in the JSON files of a model's folder. `source` names the file in errors, which are ConfigErrors."""

from collections.abc import Mapping
from typing import Any

from tokenmill_engine.errors import ConfigError


def optional_positive(config: Mapping[str, Any], key: str, source: str) -> int | None:
    """A positive integer; None if there is none."""
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(f"{source}: {key} must be a positive integer, not {value!r}")
    return value


def positive(config: Mapping[str, Any], key: str, source: str) -> int:
    """A positive integer that has to be there."""
    value = optional_positive(config, key, source)
    if value is None:
        raise ConfigError(f"{source} has no {key}")
    return value
