"""Flags of the HTTP front end that need more than a value, and those that are wrong."""

from pathlib import Path

import pytest

from tests.support.certificates import make_certificate
from tokenmill_engine.errors import ConfigError
from tokenmill_server.flags.build import build_configuration
from tokenmill_server.flags.command_line import read_flags


def test_https(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    files = ["--ssl-certfile", certificate, "--ssl-keyfile", key, "--ssl-ca-certs", certificate]
    values = read_flags([*files, "--ssl-cert-reqs", "2", "--ssl-ciphers", "HIGH", "--enable-ssl-refresh"], {})
    server = build_configuration(values).server
    assert (server.ssl_certfile, server.ssl_keyfile, server.ssl_ca_certs) == (certificate, key, certificate)
    assert (server.ssl_cert_reqs, server.ssl_ciphers, server.ssl_refresh) == (2, "HIGH", True)
    with pytest.raises(ConfigError, match="--ssl-ca-certs, which signed"):
        build_configuration(read_flags([*files[:4], "--ssl-cert-reqs", "1"], {}))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--root-path", "llm"],
        ["--root-path", "/a?b"],
        ["--allowed-origins", "[x"],
        ["--max-num-queued-reqs", "0"],
        ["--disable-access-log-for-endpoints", "health"],
        ["--middleware", "name"],
        ["--fingerprint-mode", "short"],
        ["--h11-max-header-count", "0"],
        ["--default-chat-template-kwargs", "[]"],
        ["--default-chat-template-kwargs", '{"messages": []}'],
    ],
)
def test_values_that_are_wrong(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match=arguments[0]):
        read_flags(arguments, {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--enable-log-outputs"], "--enable-log-outputs needs --enable-log-requests"),
        (["--max-log-len", "0"], "--max-log-len needs --enable-log-requests"),
        (["--disable-access-log-for-endpoints", "/a"], "endpoints needs --enable-log-requests"),
        (["--fingerprint-mode", "custom"], "needs --fingerprint-value"),
        (["--fingerprint-value", "x"], "--fingerprint-value needs --fingerprint-mode custom"),
        (["--enable-ssl-refresh"], "--enable-ssl-refresh needs --ssl-certfile"),
    ],
)
def test_what_would_do_nothing_alone(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_configuration(read_flags(arguments, {}))
