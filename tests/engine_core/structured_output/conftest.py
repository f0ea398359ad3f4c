"""Both libraries with a vocabulary of single bytes, so that any text has one spelling."""

import pytest

from tests.support.grammars import BYTES
from tokenmill_engine.structured_output.guidance_backend import GuidanceBackend
from tokenmill_engine.structured_output.xgrammar_backend import XgrammarBackend


@pytest.fixture(scope="session")
def xgrammar() -> XgrammarBackend:
    return XgrammarBackend(BYTES)


@pytest.fixture(scope="session")
def guidance() -> GuidanceBackend:
    return GuidanceBackend(BYTES)
