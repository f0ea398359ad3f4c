import io
import sys

import pytest

from tokenmill_engine.progress import progress_bar


class Full(io.StringIO):
    """A file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")

    def flush(self) -> None:
        raise OSError(28, "No space left on device")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [Full(), closed(), None])
def test_what_cannot_be_shown_stops_nothing(stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(progress_bar(range(3), mininterval=0)) == [0, 1, 2]


def test_a_bar_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    list(progress_bar(range(3), desc="things"))
    assert "things: 100%" in stream.getvalue()
