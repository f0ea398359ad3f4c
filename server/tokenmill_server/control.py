"""First message from the launcher to an API server, over its control channel."""

import msgspec

from tokenmill_engine.config.engine import EngineConfig
from tokenmill_server.config import ServerConfig


class ApiServerStart(msgspec.Struct, tag=True, frozen=True):
    """Everything an API server needs to serve. It listens at once and is ready when `EnginesReady` arrives.

    Metrics are on if the environment variable PROMETHEUS_MULTIPROC_DIR names a directory.
    """

    client: int
    """Slot of this API server, 0..api_server_count-1: its ZeroMQ identity and its cell in `accept.counts`."""
    incarnation: int
    """How often this slot was started before (0..255): keeps request ids unique over restarts."""
    run_dir: str
    """The launcher's private directory: sockets `engine-<i>.in` and `.out`, and `accept.counts`."""
    listen_fd: int
    """Inherited descriptor of the listening socket, TCP or Unix, shared by all API servers."""
    server: ServerConfig
    engine: EngineConfig
    segment_fd: int | None = None
    """Inherited descriptor of the memory in which this API server shares media; None where nothing is shared."""
