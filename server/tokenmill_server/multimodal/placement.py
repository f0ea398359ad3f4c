"""Where prepared media are remembered: which process has their keys, which their tensors, and how much of them.

| placement | API server | engine core | when |
|---|---|---|---|
| KEYS | keys | keys and tensors | one API server and one engine core: what was sent once travels as a key |
| SHARED | keys | nothing; tensors in memory that its workers read | --mm-processor-cache-type shm |
| ITEMS | keys and tensors | what live requests need | several of either |
| NOWHERE | - | what live requests need | --mm-processor-cache-gb 0 |
"""

from dataclasses import dataclass
from enum import StrEnum

from tokenmill_server.multimodal.settings import GIB, MediaSettings


class Placement(StrEnum):
    """See the table above."""

    NOWHERE = "nowhere"
    ITEMS = "items"
    KEYS = "keys"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class CachePlacement:
    """The caches of one server."""

    placement: Placement
    cache_bytes: int
    """Most that each of them takes, with all that belongs to it in other processes."""
    num_caches: int

    @property
    def names_bytes(self) -> int:
        """Part of `cache_bytes` that is for names of what is remembered: half for those of files and those that clients
        give, half for which groups of frames a video has."""
        return min(_MAX_NAMES_BYTES, self.cache_bytes // 16)

    @property
    def items_bytes(self) -> int:
        """Part of `cache_bytes` that is for prepared media."""
        return self.cache_bytes - self.names_bytes

    @property
    def engine_bytes(self) -> int:
        """What an engine core keeps beyond the needs of its live requests."""
        return self.items_bytes if self.placement is Placement.KEYS else 0

    def describe(self) -> str:
        """A line for the log."""
        if self.placement is Placement.NOWHERE:
            return "cache of prepared media: none"
        where = {
            Placement.KEYS: "keys in the API server, tensors in the engine core",
            Placement.ITEMS: "keys and tensors in the API server",
            Placement.SHARED: "keys in API servers, tensors in memory that workers read",
        }[self.placement]
        if self.placement is Placement.ITEMS and self.num_caches > 1:
            where = f"keys and tensors in each of {self.num_caches} API servers"
        kind = "shm" if self.placement is Placement.SHARED else "lru"
        most = self.num_caches * self.cache_bytes / GIB
        return f"cache of prepared media: {where} ({kind}), at most {most:.4g} GiB"


_MAX_NAMES_BYTES = 64 * 2**20


def place_caches(settings: MediaSettings, num_api_servers: int, num_engines: int) -> CachePlacement:
    """`num_engines`: those that an API server chooses from."""
    cache_bytes = int(settings.cache_gb * GIB)
    if cache_bytes == 0:
        return CachePlacement(Placement.NOWHERE, 0, 0)
    if settings.cache_type == "shm":
        return CachePlacement(Placement.SHARED, cache_bytes, num_api_servers)
    if num_api_servers == num_engines == 1:
        return CachePlacement(Placement.KEYS, cache_bytes, 1)
    return CachePlacement(Placement.ITEMS, cache_bytes, num_api_servers)
