"""Checked values of all flags, and the sources they come from.

Precedence: command line (or keyword argument), then `--config` file, then environment, then default.
"""

import difflib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tokenmill_engine.errors import ConfigError
from tokenmill_server.flags.flag import Flag
from tokenmill_server.flags.table import FLAGS
from tokenmill_server.flags.unsupported import IGNORED_ENVIRONMENT, UNSUPPORTED

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class FlagValues:
    """The value of every flag in the table, by Python name, and where the given ones were given."""

    values: dict[str, Any] = field(default_factory=lambda: {key: flag.default for key, flag in FLAGS.items()})
    given: dict[str, str] = field(default_factory=dict)
    """Python name -> how the user wrote it, for messages: `--port`, `port in a.yaml`, `TOKENMILL_PORT`, `port=`."""
    from_environment: set[str] = field(default_factory=set)
    """Names among `given` that came from the environment, which yields to every other source."""

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def is_given(self, key: str) -> bool:
        return key in self.given

    def written(self, key: str) -> str:
        """How to name a flag in a message: as the user wrote it, else as on the command line."""
        return self.given.get(key, f"--{FLAGS[key].name}")

    def reset(self, key: str) -> None:
        """Back to the default, as if it had not been given."""
        self.values[key] = FLAGS[key].default
        self.given.pop(key, None)
        self.from_environment.discard(key)

    def offer(self, key: str, value: object, origin: str) -> None:
        """Takes a value unless a stronger source already gave one.

        Raises:
            ConfigError: the value is wrong, even if it would not be used.
        """
        parsed = parse_value(FLAGS[key], value, origin)
        if key not in self.given:
            self.values[key] = parsed
            self.given[key] = origin


def parse_value(flag: Flag, value: object, origin: str) -> Any:
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
    for name, value in _read_yaml(path).items():
        key = str(name).replace("-", "_")
        origin = f"{name} in {path}"
        if key in FLAGS:
            if value is not None:
                values.offer(key, value, origin)
        elif key in UNSUPPORTED:
            check_neutral(key, value, origin)
        else:
            raise ConfigError(f"unknown key {origin}{suggestion(str(name), FLAGS)}")


def _read_yaml(path: str) -> Mapping[object, object]:
    try:
        document = yaml.load(Path(path).read_text(encoding="utf-8"), _StrictLoader)
    except OSError as error:
        raise ConfigError(f"cannot read --config {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config {path} is not UTF-8 text") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--config {path} is not valid YAML: {reason}") from None
    if document is None:
        return {}
    if not isinstance(document, Mapping):
        raise ConfigError(f"--config {path} must be a mapping of flag names to values, for example `port: 8000`")
    return document


class _StrictLoader(yaml.SafeLoader):
    """A safe loader to which a repeated key (also one spelled with the other separator) is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(self.construct_object(key_node, deep=True)).replace("-", "_")
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key} appears twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def offer_environment(values: FlagValues, environment: Mapping[str, str]) -> None:
    """Takes flags from their variables: `TOKENMILL_<FLAG>` before the aliases. Empty ones count as unset.

    Raises:
        ConfigError: a value is wrong.
    """
    for key, flag in FLAGS.items():
        for name, unit in [(flag.environment_variable, 1), *((alias.name, alias.unit) for alias in flag.env)]:
            text = environment.get(name, "").strip()
            # Kubernetes sets <SERVICE>_PORT=tcp://... in every pod beside a service named "tokenmill".
            if not text or (key == "port" and text.startswith("tcp://")):
                continue
            if unit != 1 and text == "0":
                continue
            value: object = text.split(",") if flag.is_list else text
            if not values.is_given(key):
                values.from_environment.add(key)
            values.offer(key, value if unit == 1 else parse_value(flag, value, name) * unit, name)
    for name, reason in IGNORED_ENVIRONMENT.items():
        if environment.get(name):
            logger.warning("%s has no effect: %s", name, reason)


def offer_keywords(values: FlagValues, keywords: Mapping[str, object], owner: str) -> None:
    """Takes flags from keyword arguments of `owner` (`LLM`); None leaves a flag at its default.

    Raises:
        ConfigError: an unknown or wrong argument, or a flag that is about serving over HTTP.
    """
    for key, value in keywords.items():
        origin = f"{owner}({key}=...)"
        if key in UNSUPPORTED:
            check_neutral(key, value, origin)
        elif key not in FLAGS:
            raise ConfigError(f"unknown argument {origin}{suggestion(key, FLAGS)}")
        elif not FLAGS[key].offline:
            raise ConfigError(f"{origin} is about serving over HTTP; leave it out or run `tokenmill serve`")
        elif value is not None:
            values.offer(key, value, origin)


def check_neutral(key: str, value: object, origin: str) -> None:
    """Lets a flag that is known but not supported pass if it asks for what happens anyway.

    Raises:
        ConfigError: it asks for something else.
    """
    row = UNSUPPORTED[key]
    text = str(value).strip().lower()
    if text in row.neutral or value is None:
        return
    if row.is_switch:
        raise ConfigError(f"{origin} {text} is not supported yet; {row.remark or 'leave it out'}")
    supported = " or ".join(sorted(row.neutral - {""}))
    only = f" (only {supported} is)" if supported else ""
    raise ConfigError(f"{origin} {value} is not supported yet{only}; {row.remark or 'leave it out'}")


def suggestion(name: str, candidates: Iterable[str]) -> str:
    """`; did you mean x?` with the closest known name in the spelling of `name`, or an empty text."""
    key = name.lstrip("-").replace("-", "_").lower()
    close = difflib.get_close_matches(key, list(candidates), n=1, cutoff=0.6)
    if not close:
        return ""
    if name.startswith("-"):
        return f"; did you mean --{close[0].replace('_', '-')}?"
    return f"; did you mean {close[0].replace('_', '-') if '-' in name else close[0]}?"
