"""Certificates that are renewed while the server runs (`--enable-ssl-refresh`)."""

import asyncio
import logging
import os
import ssl

from tokenmill_engine.errors import ConfigError
from tokenmill_server.config import ServerConfig
from tokenmill_server.tls import load_certificate, make_tls_context

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0


async def refresh_certificate(config: ServerConfig, context: ssl.SSLContext) -> None:
    """Reads certificate and key into `context` whenever their files have changed, until it is cancelled. Files that do
    not go together, as while one of them is being replaced, leave things as they are."""
    loaded = refused = _state(config)
    while True:
        await asyncio.sleep(_PERIOD_S)
        state = _state(config)
        if state == loaded:
            continue
        try:
            make_tls_context(config)  # a context that failed to load one may be left with half of it
            load_certificate(config, context)
        except ConfigError as error:
            if state != refused:
                logger.warning("the certificate has changed and cannot be used, the old one stays: %s", error)
            refused = state
        else:
            logger.info("the certificate has changed and is in use")
            loaded = state


def _state(config: ServerConfig) -> list[tuple[int, int, int] | None]:
    """What changes with the files."""
    return [_state_of(path) for path in (config.ssl_certfile, config.ssl_keyfile) if path is not None]


def _state_of(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
