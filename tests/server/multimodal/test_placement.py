"""Which process remembers prepared media, and how much of them."""

import pytest

from tokenmill_server.multimodal.placement import CachePlacement, Placement, place_caches
from tokenmill_server.multimodal.settings import GIB, MediaSettings


@pytest.mark.parametrize(
    ("cache_gb", "servers", "engines", "placement", "num_caches", "line"),
    [
        (4, 1, 1, Placement.KEYS, 1, "keys in the API server, tensors in the engine core (lru), at most 4 GiB"),
        (4, 1, 2, Placement.ITEMS, 1, "keys and tensors in the API server (lru), at most 4 GiB"),
        (4, 4, 1, Placement.ITEMS, 4, "keys and tensors in each of 4 API servers (lru), at most 16 GiB"),
        (0.5, 2, 2, Placement.ITEMS, 2, "keys and tensors in each of 2 API servers (lru), at most 1 GiB"),
        (0, 1, 1, Placement.NOWHERE, 0, "none"),
        (0, 3, 2, Placement.NOWHERE, 0, "none"),
    ],
)
def test_the_table(
    cache_gb: float, servers: int, engines: int, placement: Placement, num_caches: int, line: str
) -> None:
    placed = place_caches(MediaSettings(cache_gb=cache_gb), servers, engines)
    assert placed == CachePlacement(placement, int(cache_gb * GIB), num_caches)
    assert placed.describe() == f"cache of prepared media: {line}"
    assert placed.engine_bytes == (placed.items_bytes if placement is Placement.KEYS else 0)


@pytest.mark.parametrize(("servers", "engines"), [(1, 1), (4, 1), (1, 2), (3, 2)])
def test_shared_memory_is_that_of_each_api_server(servers: int, engines: int) -> None:
    placed = place_caches(MediaSettings(cache_gb=2, cache_type="shm"), servers, engines)
    assert placed == CachePlacement(Placement.SHARED, 2 * GIB, servers)
    assert placed.engine_bytes == 0
    line = "keys in API servers, tensors in memory that workers read (shm), at most"
    assert placed.describe() == f"cache of prepared media: {line} {2 * servers} GiB"
    assert place_caches(MediaSettings(cache_gb=0, cache_type="shm"), servers, engines).num_caches == 0


def test_names_and_items_share_the_room() -> None:
    for cache_gb in (1e-6, 0.001, 4.0):
        placed = place_caches(MediaSettings(cache_gb=cache_gb), 1, 1)
        assert placed.names_bytes + placed.items_bytes == placed.cache_bytes == int(cache_gb * GIB)
        assert placed.names_bytes <= placed.cache_bytes // 16
