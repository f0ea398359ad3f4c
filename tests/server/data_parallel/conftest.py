"""A head that waits for launchers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.rendezvous import Rendezvous


@pytest.fixture
def rendezvous(tmp_path: Path) -> Iterator[Rendezvous]:
    with_head = Rendezvous(tmp_path)
    yield with_head
    with_head.stop()
