"""The files of the page at `/`: plain HTML, CSS and JavaScript beside this module, held in memory once asked for.

Knows nothing of requests."""

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path

_STATIC = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class WebFile:
    """One file as it is sent."""

    content: bytes
    content_type: str
    etag: str
    """With its quotes."""


@functools.cache
def web_files() -> dict[str, WebFile]:
    """All of them by name. They are read when somebody first asks, so that servers do not start later for them, and all
    at once, so that they fit together for as long as the process lives."""
    return {path.name: _read(path) for path in sorted(_STATIC.iterdir()) if path.suffix in _TYPES}


def _read(path: Path) -> WebFile:
    content = path.read_bytes()
    return WebFile(content, _TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')
