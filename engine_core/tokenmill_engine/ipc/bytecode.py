"""Python's compiled modules, kept where nobody else keeps them.

Container images often hold none and forbid Python to write them (PYTHONDONTWRITEBYTECODE), or lie on file systems that
cannot be written. Then every process compiles the thousand modules of torch anew, which takes longer than to run them.
Who sets PYTHONPYCACHEPREFIX, even to nothing, has chosen a place, and all of Python's settings hold as they are.
"""

import importlib.util
import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from tokenmill_engine.config.cache_dir import cache_dir

_CHOSEN_PLACE = "PYTHONPYCACHEPREFIX"
_LARGEST = "torch"
"""The package that stands for all."""


def keep_bytecode() -> None:
    """Lets this process and its children keep compiled modules in `bytecode` in the cache directory, if they would be
    compiled again at every start."""
    directory = _own_place(os.environ)
    if directory is not None:
        sys.pycache_prefix, sys.dont_write_bytecode = directory, False
        _let_children_keep(os.environ, directory)


def bytecode_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for a child that keeps its compiled modules as `keep_bytecode` says, whatever this process does."""
    result = dict(environment)
    directory = _own_place(environment)
    if directory is not None:
        _let_children_keep(result, directory)
    return result


def _let_children_keep(environment: MutableMapping[str, str], directory: str) -> None:
    environment[_CHOSEN_PLACE] = directory
    environment.pop("PYTHONDONTWRITEBYTECODE", None)


def _own_place(environment: Mapping[str, str]) -> str | None:
    """Where to keep bytecode; None if it is kept elsewhere or cannot be kept."""
    if sys.pycache_prefix is not None or _CHOSEN_PLACE in environment or _is_kept_in_place():
        return None
    try:
        directory = cache_dir() / "bytecode"
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return str(directory) if os.access(directory, os.W_OK | os.X_OK) else None


def _is_kept_in_place() -> bool:
    """Whether the largest package has its bytecode beside it, or gets it when it is imported."""
    spec = importlib.util.find_spec(_LARGEST)
    if spec is None or spec.origin is None:
        return True
    bytecode = Path(importlib.util.cache_from_source(spec.origin))
    if bytecode.exists():
        return True
    folder = bytecode.parent if bytecode.parent.exists() else bytecode.parent.parent
    return not sys.dont_write_bytecode and os.access(folder, os.W_OK | os.X_OK)
