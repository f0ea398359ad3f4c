"""Reads the YAML file of `--config`: a mapping, strictly. Knows nothing of flags."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tokenmill_engine.errors import ConfigError


def read_yaml(path: str) -> Mapping[object, object]:
    """The mapping in the file.

    Raises:
        ConfigError: the file cannot be read or holds something else.
    """
    try:
        document = yaml.load(Path(path).read_text(encoding="utf-8"), _StrictLoader)
    except OSError as error:
        raise ConfigError(f"cannot read --config {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config {path} is not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path} is not valid YAML: {_reason(error)}") from None
    if document is None:
        return {}
    if not isinstance(document, Mapping):
        raise ConfigError(f"--config {path} must be a mapping of flag names to values, for example `port: 8000`")
    return document


def _reason(error: yaml.YAMLError) -> str:
    """What is wrong and in which line, without the parser's name for its input."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}: " if mark is not None else ""
        return place + ", ".join(filter(None, (error.context, error.problem)))
    if isinstance(error, yaml.reader.ReaderError):
        return f"character U+{error.character:04X} at position {error.position} is not allowed"
    return " ".join(str(error).split())


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
