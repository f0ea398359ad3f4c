"""The embedded model's header, which nearly every test here needs, is read once for all tests of a file."""

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenmill_engine.config import model_files
from tokenmill_engine.config.gguf_file import GGUFFile, read_gguf


@pytest.fixture(scope="module", autouse=True)
def _embedded_header_is_read_once() -> Iterator[None]:
    embedded = model_files.embedded_model_path()
    known = functools.cache(read_gguf)

    def read(path: str | Path) -> GGUFFile:
        return known(embedded) if Path(path) == embedded else read_gguf(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_files, "read_gguf", read)
        yield
