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


class CertificateRefresher:
    """Keeps the certificate of a TLS context as its files are. To be made before the context: files that change while
    the server starts, after it has read them, have then changed."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._loaded = self._refused = _state(config)

    async def run(self, context: ssl.SSLContext) -> None:
        """Looks at the files again and again, until it is cancelled."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            self.look(context)

    def look(self, context: ssl.SSLContext) -> None:
        """Reads certificate and key into `context` if their files have changed. Files that do not go together, as while
        one of them is being replaced, leave things as they are."""
        state = _state(self._config)
        if state == self._loaded:
            return
        try:
            make_tls_context(self._config)  # a context that failed to load one may be left with half of it
            load_certificate(self._config, context)
        except ConfigError as error:
            if state != self._refused:
                logger.warning("the certificate has changed and cannot be used, the old one stays: %s", error)
            self._refused = state
        else:
            logger.info("the certificate has changed and is in use")
            self._loaded = state


def _state(config: ServerConfig) -> list[tuple[int, int, int] | None]:
    """What changes with the files."""
    return [_state_of(path) for path in (config.ssl_certfile, config.ssl_keyfile) if path is not None]


def _state_of(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
