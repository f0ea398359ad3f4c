"""Checked values of all flags, and the sources they come from.

Precedence: command line (or keyword argument), then `--config` file, then environment, then default.
"""

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenmill_engine.errors import ConfigError
from tokenmill_server.flags.flag import Flag
from tokenmill_server.flags.origin import Origin, in_call, in_environment, in_file, on_command_line
from tokenmill_server.flags.parsers import boolean
from tokenmill_server.flags.suggestion import suggestion
from tokenmill_server.flags.table import FLAGS
from tokenmill_server.flags.unsupported import UNSUPPORTED
from tokenmill_server.flags.variables import is_service_link, warn_of_variables
from tokenmill_server.flags.yaml_file import read_yaml

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class FlagValues:
    """The value of every flag in the table, by Python name, and where the given ones were given."""

    values: dict[str, Any] = field(default_factory=lambda: {key: flag.default for key, flag in FLAGS.items()})
    given: dict[str, Origin] = field(default_factory=dict)
    """Python name -> where the value was given."""
    from_environment: set[str] = field(default_factory=set)
    """Names among `given` that came from the environment, which yields to every other source."""

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def is_given(self, key: str) -> bool:
        return key in self.given

    def written(self, key: str) -> str:
        """How to name a flag in a message: as the user wrote it, else as on the command line."""
        return self._origin(key).name

    def stated(self, key: str) -> str:
        """A flag with its value, as the user wrote it, else as on the command line."""
        return self._origin(key).stated(self.values[key])

    def _origin(self, key: str) -> Origin:
        return self.given.get(key) or on_command_line(FLAGS[key].name)

    def reset(self, key: str) -> None:
        """Back to the default, as if it had not been given."""
        self.values[key] = FLAGS[key].default
        self.given.pop(key, None)
        self.from_environment.discard(key)

    def settle(self, first: str, second: str, advice: str) -> None:
        """For two given flags that cannot both hold: one from the environment yields to the other.

        Raises:
            ConfigError: both are as strong. `advice` says why they contradict each other.
        """
        weaker = [key for key in (first, second) if key in self.from_environment]
        if len(weaker) != 1:
            raise ConfigError(f"{self.written(first)} contradicts {self.written(second)}: {advice}; leave one out")
        self.reset(weaker[0])

    def offer(self, key: str, value: object, origin: Origin) -> None:
        """Takes a value unless a stronger source already gave one.

        Raises:
            ConfigError: the value is wrong, even if it would not be used.
        """
        parsed = parse_value(FLAGS[key], value, origin)
        if key not in self.given:
            self.values[key] = parsed
            self.given[key] = origin


def parse_value(flag: Flag, value: object, origin: Origin) -> Any:
    """The checked value of `flag`.

    Raises:
        ConfigError: it is of a wrong type or out of range.
    """
    try:
        return flag.parse(value)
    except ValueError as error:
        shown = value[0] if isinstance(value, list) and len(value) == 1 else value
        raise ConfigError(f"{origin} must be {error}; got {shown!r}") from None


def offer_file(values: FlagValues, path: str) -> None:
    """Takes the flags of a YAML file, whose keys are flag names with `-` or `_`.

    Raises:
        ConfigError: the file cannot be read, is not a mapping, or holds an unknown key or a wrong value.
    """
    for name, value in read_yaml(path).items():
        key = str(name).replace("-", "_")
        origin = in_file(str(name), path)
        if key in FLAGS:
            if value is not None:
                values.offer(key, value, origin)
        elif key in UNSUPPORTED:
            check_neutral(key, value, origin.stated(_scalar(value)))
        else:
            raise ConfigError(f"unknown key {origin}{suggestion(str(name), FLAGS)}")


def _scalar(value: object) -> object:
    """A value as YAML spells it."""
    return str(value).lower() if isinstance(value, bool) else value


def offer_environment(values: FlagValues, environment: Mapping[str, str]) -> None:
    """Takes flags from their variables: `TOKENMILL_<FLAG>` before the aliases. Empty ones count as unset. Variables
    that look as if they were meant for Tokenmill and mean nothing are named in the log.

    Raises:
        ConfigError: a value is wrong, or asks for what is not supported.
    """
    for key, flag in FLAGS.items():
        for name, unit in [(flag.environment_variable, 1), *((alias.name, alias.unit) for alias in flag.env)]:
            text = environment.get(name, "").strip()
            if not text or is_service_link(name, text):
                continue
            if unit != 1 and text == "0":
                continue
            value: object = text.split(",") if flag.is_list else text
            if not values.is_given(key):
                values.from_environment.add(key)
            origin = in_environment(name)
            values.offer(key, value if unit == 1 else parse_value(flag, value, origin) * unit, origin)
    for row in UNSUPPORTED.values():
        text = environment.get(row.environment_variable, "").strip()
        if text and not is_service_link(row.environment_variable, text):
            check_neutral(row.key, text, in_environment(row.environment_variable).stated(text))
    warn_of_variables(environment)


def offer_keywords(values: FlagValues, keywords: Mapping[str, object], owner: str) -> None:
    """Takes flags from keyword arguments of `owner` (`LLM`); None leaves a flag at its default.

    Raises:
        ConfigError: an unknown or wrong argument, or a flag that is about serving over HTTP.
    """
    for key, value in keywords.items():
        origin = in_call(owner, key)
        if key in UNSUPPORTED:
            check_neutral(key, value, origin.stated(value))
        elif key not in FLAGS:
            raise ConfigError(f"unknown argument {origin}{suggestion(key, FLAGS)}")
        elif not FLAGS[key].offline:
            raise ConfigError(f"{origin} is about serving over HTTP; leave it out or run `tokenmill serve`")
        elif value is not None:
            values.offer(key, value, origin)


def check_neutral(key: str, value: object, stated: str) -> None:
    """Lets a flag that is known but not supported pass if it asks for what happens anyway. `stated` is the flag with
    its value, as the user wrote them.

    Raises:
        ConfigError: it asks for something else.
    """
    row = UNSUPPORTED[key]
    text = str(value).strip().lower()
    if row.is_switch:
        with contextlib.suppress(ValueError):
            text = str(boolean(value)).lower()
    if value is None or text in row.neutral:
        if row.notice and text == "true":
            logger.warning("%s has no effect: %s", stated, row.notice)
        return
    supported = " or ".join(sorted(row.neutral - {""}))
    only = f" (only {supported} is)" if supported and not row.is_switch else ""
    raise ConfigError(f"{stated} is not supported yet{only}; {row.remark or 'leave it out'}")
