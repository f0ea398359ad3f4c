"""What the two offline benchmarks share: an engine from flags, random prompts, a result file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenmill_engine.errors import ConfigError
from tokenmill_server.flags.command_line import read_flags
from tokenmill_server.llm import LLM


def start_engine(flags: Sequence[str]) -> LLM:
    """An engine with the flags of the command line.

    Raises: ConfigError, StartupError.
    """
    values = read_flags(flags)
    return LLM(**{key: values[key] for key in values.given})


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Raises: ConfigError when the file cannot be written."""
    try:
        path.write_text(json.dumps(result, indent=4) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write --output-json {path}: {error.strerror}") from None
