"""One API server process for all tests that only send requests to it."""

from collections.abc import Iterator

import httpx
import pytest

from tests.support.api_server import Server, engine_config, run_server
from tokenmill_engine.config.model_files import embedded_model_path
from tokenmill_engine.config.pooling import PoolingConfig
from tokenmill_server.processing.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with run_server() as running:
        yield running


@pytest.fixture(scope="session")
def embedder() -> Iterator[Server]:
    """Its model makes vectors."""
    engine = engine_config(pooling=PoolingConfig("last"))
    with run_server(engine=engine, engine_options={"vector_size": 576}) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(str(embedded_model_path()))
