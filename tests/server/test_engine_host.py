"""The host over scripted engine cores; `tests/e2e/test_llm.py` has the real ones."""

from pathlib import Path

import pytest

from tests.support.api_server import engine_config
from tokenmill_engine.config.model_files import embedded_model_path
from tokenmill_engine.errors import EngineDeadError, StartupError, TokenmillError
from tokenmill_server import supervisor
from tokenmill_server.engine_host import EngineHost
from tokenmill_server.processing.tokenizer import load_tokenizer


@pytest.mark.parametrize(
    ("behaviour", "error", "message"),
    [
        ("refuse", StartupError, "not enough of everything"),
        ("crash", StartupError, "while it was starting"),
        ("die", EngineDeadError, "engine core 0 exited with status 4"),
    ],
)
def test_engines_that_do_not_get_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: str, error: type[TokenmillError], message: str
) -> None:
    """Whenever it ends, the start fails and says why, long before it would be taken to hang."""
    monkeypatch.setattr(supervisor, "_ENGINE_MODULE", "tests.support.scripted_engine")
    monkeypatch.setenv("CHILD_ENGINE", behaviour)
    monkeypatch.setenv("CHILD_LOG", str(tmp_path / "log"))
    host = EngineHost(engine_config(), load_tokenizer(str(embedded_model_path())))
    with pytest.raises(error, match=message):
        host.start()
