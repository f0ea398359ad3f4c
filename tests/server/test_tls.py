"""What HTTPS needs, and the start errors of what is of no use."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import make_certificate
from tokenmill_engine.errors import ConfigError
from tokenmill_server.config import ServerConfig
from tokenmill_server.tls import make_tls_context


def test_without_a_certificate_it_is_plain_http() -> None:
    assert make_tls_context(ServerConfig()) is None


def test_files_and_values_that_are_wrong(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    _, locked = make_certificate(tmp_path, "locked", password="secret")
    _, other = make_certificate(tmp_path, "other")
    context = make_tls_context(ServerConfig(ssl_certfile=certificate, ssl_keyfile=key))
    assert context is not None
    cases: list[tuple[dict[str, Any], str]] = [
        ({"ssl_keyfile": key}, "--ssl-keyfile needs --ssl-certfile"),
        ({"ssl_cert_reqs": 2}, "--ssl-cert-reqs needs --ssl-certfile"),
        ({"ssl_certfile": certificate}, "--ssl-certfile, --ssl-keyfile: "),
        ({"ssl_certfile": str(tmp_path / "none")}, "No such file"),
        ({"ssl_certfile": certificate, "ssl_keyfile": other}, "key values mismatch"),
        ({"ssl_certfile": certificate, "ssl_keyfile": locked}, "not encrypted"),
        ({"ssl_certfile": certificate, "ssl_keyfile": key, "ssl_cert_reqs": 2}, "needs --ssl-ca-certs"),
        ({"ssl_certfile": certificate, "ssl_keyfile": key, "ssl_ca_certs": key}, "--ssl-ca-certs .*name a PEM file"),
        ({"ssl_certfile": certificate, "ssl_keyfile": key, "ssl_ciphers": "none"}, "no such ciphers"),
    ]
    for options, message in cases:
        with pytest.raises(ConfigError, match=message):
            make_tls_context(ServerConfig(**options))
