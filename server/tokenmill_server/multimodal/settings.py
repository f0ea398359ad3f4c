"""What an API server may fetch and decode. Knows nothing of flags, which fill it in, nor of models."""

from dataclasses import dataclass
from typing import Literal

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True, slots=True)
class MediaSettings:
    """Limits that hold for each API server, and for `LLM`."""

    loading_threads: int = 8
    """Threads that decode and prepare media."""
    max_images: int = 999
    """In a request."""
    fetch_timeout_s: float = 5.0
    """For an image at an http(s) address, redirects included."""
    max_bytes: int = 256 * MIB
    """Of encoded media: of each, and of all of a request together."""
    max_pixels: int = 178_956_970
    """Of an image as it is stored, before it is decoded."""
    allow_redirects: bool = True
    allowed_domains: tuple[str, ...] = ()
    """Names of hosts, in lower case: media come from these alone, and whatever address they have. Empty: from every
    host with a public address."""
    local_path: str | None = None
    """Folder whose files may be named by file: addresses; None: none may."""
    cache_gb: float = 4.0
    """GiB of each cache of prepared media; 0: nothing is remembered."""
    cache_type: Literal["lru", "shm"] = "lru"
