"""Fingerprints change with what decides answers, unless they are the owner's own."""

from dataclasses import replace

from tests.support.api_server import engine_config
from tokenmill_engine.config.parallel import ParallelConfig
from tokenmill_server.config import ServerConfig
from tokenmill_server.fingerprint import make_fingerprint


def test_modes() -> None:
    engine = engine_config()
    full = make_fingerprint(ServerConfig(fingerprint_mode="full"), engine)
    hashed = make_fingerprint(ServerConfig(fingerprint_mode="hash"), engine)
    assert full is not None
    assert full.startswith("tokenmill-")
    assert hashed is not None
    assert len(hashed) == 8
    for changed in (engine_config(dtype="float16"), replace(engine, parallel=ParallelConfig(2))):
        assert make_fingerprint(ServerConfig(), changed) != full
        assert make_fingerprint(ServerConfig(fingerprint_mode="hash"), changed) != hashed
    assert make_fingerprint(ServerConfig(fingerprint_mode="none"), engine) is None
    assert make_fingerprint(ServerConfig(fingerprint_mode="custom", fingerprint_value="x"), engine) == "x"
