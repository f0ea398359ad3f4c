"""An API server's application without its process: its routes are called as the HTTP server calls them."""

import asyncio
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message

from tests.support.api_server import MODEL_NAME, engine_config
from tokenmill_engine.config.engine import EngineConfig
from tokenmill_server.api_process import build_context
from tokenmill_server.config import ServerConfig
from tokenmill_server.context import ServerContext
from tokenmill_server.control import ApiServerStart
from tokenmill_server.readiness import Phase


def make_context(run_dir: Path, engine: EngineConfig | None = None, **options: Any) -> ServerContext:
    """Of a server that takes requests. `options`: fields of `ServerConfig`. PROMETHEUS_MULTIPROC_DIR must be set."""
    server = ServerConfig(served_model_names=(MODEL_NAME,), **options)
    context = build_context(ApiServerStart(0, 0, str(run_dir), 0, server, engine or engine_config()))
    context.readiness.move(Phase.READY)
    return context


async def send(app: ASGIApp, method: str, path: str, body: bytes = b"") -> tuple[list[Message], Exception | None]:
    """What the application sends for one request, and what it raises."""
    sent: list[Message] = []
    received = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        message = next(received, None)
        if message is None:
            await asyncio.Event().wait()
        assert message is not None
        return message

    async def keep(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "root_path": ""}
    scope |= {"headers": [(b"content-type", b"application/json")], "http_version": "1.1", "state": {}}
    try:
        await app(scope, receive, keep)
    except Exception as error:
        return sent, error
    return sent, None
