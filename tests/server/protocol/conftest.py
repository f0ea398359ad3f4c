"""The embedded model's tokenizer."""

import pytest

from tokenmill_engine.config.model_files import embedded_model_path
from tokenmill_server.processing.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(str(embedded_model_path()))
