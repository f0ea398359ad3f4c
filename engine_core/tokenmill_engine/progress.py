"""Progress bars on standard error that never stop the work whose progress they show."""

import logging
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from tqdm import tqdm

_LOG_INTERVAL_S = 5.0
"""Between two lines where standard error is no terminal."""


class _Lenient:
    """A text stream whose reader may be gone, or whose disk full: what cannot be written is lost."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):  # the latter: closed
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def progress_bar(items: Iterable[Any] | None = None, *, disable: bool = False, **options: Any) -> "tqdm[Any]":
    """A bar over `items`, or one that `update` moves; `options` are tqdm's. None is shown without standard error."""
    if sys.stderr is None or sys.stderr.closed:
        return tqdm(items, disable=True, **options)
    return tqdm(items, disable=disable, file=_Lenient(sys.stderr), **options)


def log_progress_bar(logger: logging.Logger, items: Iterable[Any] | None = None, **options: Any) -> "tqdm[Any]":
    """As `progress_bar`, for what a server's log should show: seldom, and not at all if INFO is off, unless somebody
    sits in front of it."""
    terminal = sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()
    return progress_bar(
        items,
        disable=not (terminal or logger.isEnabledFor(logging.INFO)),
        mininterval=0.1 if terminal else _LOG_INTERVAL_S,
        **options,
    )
