"""Servers that several tests share. A test that changes or breaks a server starts its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server import Server, start_server
from tests.support.tiny_models import cached_tiny_model

TINY_FLAGS = ("--device", "cpu", "--dtype", "float32", "--kv-cache-memory-bytes", "64M")


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """A random Llama whose context is long enough for requests that run until they are stopped."""
    return cached_tiny_model("llama", max_position_embeddings=65536)


@pytest.fixture(scope="session")
def tiny_server(tiny_model: Path) -> Iterator[Server]:
    """The tiny model with defaults: one engine core, one API server."""
    with start_server(str(tiny_model), *TINY_FLAGS, "--served-model-name", "tiny") as server:
        server.remember_control()
        yield server


@pytest.fixture(scope="session")
def split_server(tiny_model: Path) -> Iterator[Server]:
    """Two API servers before two engine cores with two workers each. Tests may kill whatever comes back by itself, and
    wait until it has."""
    flags = ("-dp", "2", "-tp", "2", "--api-server-count", "2", "--max-engine-restarts", "50")
    with start_server(str(tiny_model), *TINY_FLAGS, *flags, wait=False) as server:
        server.wait_until_ready(timeout_s=180)
        yield server


@pytest.fixture(scope="session")
def smollm_server() -> Iterator[Server]:
    """The embedded model in float32, whose greedy answers are known; two API servers."""
    flags = ("--device", "cpu", "--dtype", "float32", "--kv-cache-memory-bytes", "512M", "--api-server-count", "2")
    with start_server(*flags) as server:
        server.remember_control()
        yield server


@pytest.fixture(scope="session")
def scaled_server(tiny_model: Path) -> Iterator[Server]:
    """Four API servers in front of two engine cores; metrics under both namespaces. Tests may kill an API server,
    though not five in a minute."""
    flags = ("--api-server-count", "4", "-dp", "2", "--metrics-namespace", "tokenmill,vllm")
    with start_server(str(tiny_model), *TINY_FLAGS, *flags) as server:
        server.remember_control()
        yield server
