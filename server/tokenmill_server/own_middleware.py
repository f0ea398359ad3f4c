"""Middleware of the server's owner (`--middleware`): code that is imported by name and put around the application."""

import importlib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import ASGIApp

from tokenmill_engine.errors import ConfigError

Wrap = Callable[[ASGIApp], ASGIApp]
"""Puts one around an application. Raises ConfigError naming the path of what fails at it."""


def load_middleware(paths: Sequence[str]) -> list[Wrap]:
    """What puts each around an application. Raises ConfigError naming the path that leads to nothing of use."""
    return [partial(_wrap, path, _load(path)) for path in paths]


def _wrap(path: str, make: Callable[[ASGIApp], object], app: ASGIApp) -> ASGIApp:
    try:
        made = make(app)
    except Exception as error:  # whatever code of somebody else raises
        raise ConfigError(
            f"--middleware {path}: it cannot be made: {type(error).__name__}: {error}; it is called with the "
            "application and nothing else"
        ) from error
    if not callable(made):
        raise ConfigError(f"--middleware {path}: its objects cannot be called; give it an ASGI __call__")
    return cast(ASGIApp, made)


def _load(path: str) -> Callable[[ASGIApp], object]:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever code of somebody else raises
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"--middleware {path}: {reason}; name a class or function as package.module.Name, in a folder of PYTHONPATH"
        ) from None
    if inspect.isclass(found):
        return cast(Callable[[ASGIApp], object], found)
    if inspect.iscoroutinefunction(found):
        dispatch: Any = found
        return lambda app: BaseHTTPMiddleware(app, dispatch=dispatch)
    raise ConfigError(f"--middleware {path}: it is neither a class nor an async function; name one")
