"""`system_fingerprint` of answers (`--fingerprint-mode`)."""

import hashlib

from tokenmill_engine.config.engine import EngineConfig
from tokenmill_server.config import ServerConfig
from tokenmill_server.version import __version__


def make_fingerprint(server: ServerConfig, engine: EngineConfig) -> str | None:
    """By default it changes with whatever changes answers to the same request."""
    if server.fingerprint_mode == "none":
        return None
    if server.fingerprint_mode == "custom":
        return server.fingerprint_value
    model = engine.model
    facts = f"{model.name} {model.path} {model.dtype} {server.chat_template}"
    parallel = engine.parallel  # another order of additions
    sizes = {"tp": parallel.tensor_parallel_size, "pp": parallel.pipeline_parallel_size}
    workers = "".join(f"-{name}{size}" for name, size in sizes.items() if size > 1)
    if server.fingerprint_mode == "hash":
        return hashlib.sha256(f"{__version__}{workers} {facts}".encode()).hexdigest()[:8]
    return f"tokenmill-{__version__}{workers}-{hashlib.sha256(facts.encode()).hexdigest()[:8]}"
