"""POST /v1/score and POST /v1/rerank"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from starlette.types import ASGIApp

from tests.support.api_server import engine_config
from tests.support.asgi import make_context, send
from tests.support.echo_engine import EchoEngine
from tests.support.server import PATIENCE_S
from tokenmill_engine.config.pooling import PoolingConfig
from tokenmill_server.app import create_app
from tokenmill_server.routes import scoring

NUM_TEXTS = 40
SCORE = {"text_1": "a", "text_2": ["b"] * NUM_TEXTS}
RERANK = {"query": "a", "documents": ["b"] * NUM_TEXTS}


@pytest_asyncio.fixture
async def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ASGIApp]:
    """Of a server whose model makes vectors of 576 numbers."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    engine = EchoEngine(str(tmp_path), vector_size=576).start()
    context = make_context(tmp_path, engine_config(pooling=PoolingConfig("last")))
    await context.generator.connect(engine.ready())
    yield create_app(context)
    context.generator.disconnect()
    engine.stop()


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "body"), [("/v1/score", SCORE), ("/v1/rerank", RERANK)])
async def test_scores_of_many_numbers_do_not_hold_up_others(
    app: ASGIApp, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(scoring, "cosines", once_others_had_a_turn(scoring.cosines, asyncio.get_running_loop()))
    (start, answer), error = await send(app, "POST", path, json.dumps(body).encode())
    assert (start["status"], error) == (200, None)
    reply = json.loads(answer["body"])
    assert len(reply.get("data") or reply["results"]) == NUM_TEXTS


def once_others_had_a_turn(work: Callable[..., Any], loop: asyncio.AbstractEventLoop) -> Callable[..., Any]:
    """`work`, which fails where the event loop waits for it."""

    def patient(*arguments: Any) -> Any:
        turn = threading.Event()
        loop.call_soon_threadsafe(turn.set)
        assert turn.wait(PATIENCE_S if threading.current_thread() is not threading.main_thread() else 0)
        return work(*arguments)

    return patient
