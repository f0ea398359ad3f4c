"""The memory in which API servers share prepared media with the engine cores and workers of this machine: one segment
for each API server. Whoever starts these processes makes it, and they inherit it: it has no name, and is gone with the
last of them.
"""

import contextlib
import logging
import os
from collections.abc import Iterator

from tokenmill_engine.config.device import available_host_bytes
from tokenmill_engine.errors import StartupError, describe_os_error
from tokenmill_engine.ipc.object_store import ObjectStore
from tokenmill_engine.ipc.shared_objects import create_segment
from tokenmill_engine.media_store import ITEM_OVERHEAD_BYTES
from tokenmill_server.config import Configuration
from tokenmill_server.flags.values import FlagValues
from tokenmill_server.multimodal.placement import Placement, place_caches
from tokenmill_server.multimodal.settings import GIB, MIB, MediaSettings

logger = logging.getLogger(__name__)


def may_share(values: FlagValues) -> bool:
    """Whether there may be segments, as far as flags alone tell."""
    return bool(values["mm_processor_cache_type"] == "shm" and values["mm_processor_cache_gb"] > 0)


@contextlib.contextmanager
def create_segments(configuration: Configuration) -> Iterator[tuple[int, ...]]:
    """Descriptors of the segments, by number of the API server, for as long as the context lasts; none where nothing is
    to be shared.

    Raises:
        StartupError: the machine, or the control group that this process runs in, has not got so much memory now; it
            is taken little by little. Or a file may not be so large.
    """
    media, count = configuration.server.media, configuration.server.api_server_count
    caches = place_caches(media, count, configuration.engine.data_parallel_size)
    if caches.placement is not Placement.SHARED or configuration.engine.model.media is None:
        yield ()
        return
    _check_memory(caches.cache_bytes, count)
    with contextlib.ExitStack() as stack:
        segments = []
        for _ in range(count):
            try:
                segments.append(create_segment(caches.items_bytes))
            except OSError as error:
                raise StartupError(
                    f"no memory of {media.cache_gb:g} GiB can be shared: {describe_os_error(error)}; lower "
                    "--mm-processor-cache-gb, or use --mm-processor-cache-type lru"
                ) from error
            stack.callback(os.close, segments[-1])
        yield tuple(segments)


def open_store(segment: int, client: int, media: MediaSettings) -> ObjectStore:
    """What API server `client` keeps in its segment, where nothing is yet. Raises OSError if there is no memory at
    all."""
    return ObjectStore(segment, client, media.max_shared_object_mb * MIB, ITEM_OVERHEAD_BYTES)


def _check_memory(num_bytes: int, count: int) -> None:
    available = available_host_bytes()
    if num_bytes * count > available:
        raise StartupError(
            f"prepared media may take {num_bytes * count / GIB:.2f} GiB of shared memory, --mm-processor-cache-gb for "
            f"each of {count} API server{'s' if count > 1 else ''}, and {available / GIB:.2f} GiB are free; lower "
            "--mm-processor-cache-gb or --api-server-count"
        )
