"""The endpoints that are called without the framework's layers answer whatever happens in them, once."""

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.types import Message

from tests.support.asgi import make_context, send
from tokenmill_server.app import create_app
from tokenmill_server.context import ServerContext

BODY = b'{"prompt": [1, 2, 3], "max_tokens": 1, "stream": true}'


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerContext]:
    """Of a server whose engine is not there."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    context = make_context(tmp_path)
    yield context
    context.generator.disconnect()


def ask(
    context: ServerContext, method: str = "POST", path: str = "/v1/completions"
) -> tuple[list[Message], Exception | None]:
    return asyncio.run(send(create_app(context), method, path, BODY))


def test_an_error_of_the_request_is_answered(context: ServerContext) -> None:
    context.inputs.max_model_len = 2
    (start, body), error = ask(context)
    assert (start["status"], error) == (400, None)
    assert b"maximum context length is 2 tokens" in body["body"]
    assert b"x-request-id" in dict(start["headers"])


def test_a_bug_is_answered_and_told(context: ServerContext) -> None:
    context.inputs.vocab_size = "many"  # type: ignore[assignment]
    (start, body), error = ask(context)
    assert start["status"] == 500
    assert b"internal" in body["body"]
    assert isinstance(error, TypeError)


def test_an_engine_that_is_gone_is_an_http_error(context: ServerContext) -> None:
    (start, body), error = ask(context)
    assert (start["status"], error) == (500, None)
    assert b"the engine is not connected" in body["body"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/completions", 405), ("POST", "/v1/completion", 404), ("GET", "/v1/models", 200)],
)
def test_everything_else_goes_its_usual_way(context: ServerContext, method: str, path: str, status: int) -> None:
    sent, error = ask(context, method, path)
    assert (sent[0]["status"], error) == (status, None)


@pytest.mark.parametrize("path", ["/v1/models", "/webui/llm/v1/models", "/webui/llm/webui/llm/v1/models"])
def test_no_prefix_of_a_proxy_opens_what_needs_a_key(context: ServerContext, path: str) -> None:
    """Not even one that looks like the files of the page, which need none."""
    context.config = dataclasses.replace(context.config, api_keys=("secret",), root_path="/webui/llm")
    sent, error = ask(context, "GET", path)
    assert error is None
    assert sent[0]["status"] == 401
