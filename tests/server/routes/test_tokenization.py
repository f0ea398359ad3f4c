"""GET /tokenizer_info"""

import json
import os
from pathlib import Path

import pytest

from tests.support.api_server import engine_config
from tests.support.asgi import make_context, send
from tokenmill_engine.config.model_files import embedded_model_path
from tokenmill_server.app import create_app


@pytest.mark.asyncio
async def test_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers of GGUF files are megabytes."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    file = tmp_path / "model.gguf"
    os.symlink(embedded_model_path(), file)
    context = make_context(tmp_path, engine_config(tokenizer_path=str(file)), tokenizer_info=True)
    app = create_app(context)

    async def facts() -> object:
        (start, body), error = await send(app, "GET", "/tokenizer_info")
        assert (start["status"], error) == (200, None)
        return json.loads(body["body"])

    first = await facts()
    file.unlink()
    assert await facts() == first
    context.generator.disconnect()
