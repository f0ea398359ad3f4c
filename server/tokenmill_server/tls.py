"""HTTPS: the one place that makes a TLS context of the server's flags."""

import ssl

from tokenmill_engine.errors import ConfigError
from tokenmill_server.config import ServerConfig


def make_tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """None: the server speaks plain HTTP.

    Raises ConfigError naming the flag whose file or value is of no use.
    """
    if config.ssl_certfile is None:
        for flag in ("ssl_keyfile", "ssl_ca_certs", "ssl_ciphers"):
            if getattr(config, flag) is not None:
                raise ConfigError(f"--{flag.replace('_', '-')} needs --ssl-certfile, the server's own certificate")
        if config.ssl_cert_reqs:
            raise ConfigError("--ssl-cert-reqs needs --ssl-certfile, the server's own certificate")
        if config.ssl_refresh:
            raise ConfigError("--enable-ssl-refresh needs --ssl-certfile, the server's own certificate")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_certificate(config, context)
    context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--ssl-ca-certs {config.ssl_ca_certs}: {_reason(error)}; name a PEM file") from None
    elif config.ssl_cert_reqs:
        raise ConfigError("--ssl-cert-reqs needs --ssl-ca-certs, which signed the clients' certificates")
    if config.ssl_ciphers is not None:
        try:
            context.set_ciphers(config.ssl_ciphers)
        except ssl.SSLError:
            raise ConfigError(f"--ssl-ciphers {config.ssl_ciphers}: no such ciphers; use OpenSSL's names") from None
    return context


def load_certificate(config: ServerConfig, context: ssl.SSLContext) -> None:
    """What new connections of `context` show. Raises ConfigError if certificate and key are of no use."""
    if config.ssl_certfile is None:
        raise AssertionError("no certificate")
    try:
        # An encrypted key would ask for its password on a terminal that nobody watches.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
    except (OSError, ValueError) as error:
        files = " and ".join(filter(None, (config.ssl_certfile, config.ssl_keyfile)))
        raise ConfigError(
            f"--ssl-certfile, --ssl-keyfile: {_reason(error)} ({files}); name a PEM file with the certificate and one "
            "with its private key, which is not encrypted"
        ) from None


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not PEM").lower().replace("_", " ")
    return getattr(error, "strerror", None) or str(error)
