"""Workers that have faults."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tokenmill_engine.executor import worker_pool


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the next workers a fault; returns the file of their notes."""
    notes = tmp_path_factory.mktemp("notes") / "notes"
    notes.touch()

    def prepare(text: str) -> Path:
        monkeypatch.setattr(worker_pool, "_MODULE", "tests.support.faulty_worker")
        monkeypatch.setenv("WORKER_FAULT", text)
        monkeypatch.setenv("WORKER_NOTES", str(notes))
        return notes

    return prepare
