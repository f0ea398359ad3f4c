import json
import time
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.exceptions import HTTPException

from tokenmill_engine.errors import (
    AuthenticationError,
    ContextLengthError,
    EngineDeadError,
    EngineError,
    EngineStartingError,
    EngineUnavailableError,
    InvalidRequestError,
    NotBegunError,
    NotFoundError,
    OverloadedError,
    RequestError,
)
from tokenmill_server.errors import BodyTooLargeError, ShuttingDownError, UnsupportedEncodingError, describe
from tokenmill_server.protocol.chat import ChatRequest
from tokenmill_server.protocol.completions import CompletionRequest
from tokenmill_server.protocol.tokenize import DetokenizeRequest, TokenizeRequest


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code"),
    [
        (InvalidRequestError("m", "n"), 400, "invalid_request_error", "n", "invalid_value"),
        (InvalidRequestError("m", "n", "special"), 400, "invalid_request_error", "n", "special"),
        (ContextLengthError("m", "prompt"), 400, "invalid_request_error", "prompt", "context_length_exceeded"),
        (RequestError("m"), 400, "invalid_request_error", None, "invalid_value"),
        (AuthenticationError("m"), 401, "invalid_request_error", None, "invalid_api_key"),
        (NotFoundError("m", "model", "model_not_found"), 404, "invalid_request_error", "model", "model_not_found"),
        (HTTPException(404, "m"), 404, "invalid_request_error", None, "not_found"),
        (HTTPException(405, "m"), 405, "invalid_request_error", None, "method_not_allowed"),
        (BodyTooLargeError("m"), 413, "invalid_request_error", None, "request_too_large"),
        (UnsupportedEncodingError("m"), 415, "invalid_request_error", None, "unsupported_content_encoding"),
        (EngineStartingError("m"), 503, "server_error", None, "engine_starting"),
        (NotBegunError("m"), 503, "server_error", None, "engine_unavailable"),
        (OverloadedError("m"), 503, "server_error", None, "server_overloaded"),
        (ShuttingDownError("m"), 503, "server_error", None, "server_shutting_down"),
        (EngineError("m"), 500, "server_error", None, "engine_error"),
        (EngineDeadError("m"), 500, "server_error", None, "engine_dead"),
    ],
)
def test_table(error: Exception, status: int, kind: str, param: str | None, code: str) -> None:
    reply = describe(error)
    assert reply.status == status
    assert json.loads(reply.json()) == {"error": {"message": "m", "type": kind, "param": param, "code": code}}


def test_what_was_not_meant_for_clients_stays_inside() -> None:
    reply = describe(KeyError("/secret/path"))
    assert (reply.status, reply.code) == (500, "internal_error")
    assert reply.headers == {"x-should-retry": "false"}
    assert "secret" not in reply.message


def test_headers_tell_clients_whether_to_retry() -> None:
    assert describe(OverloadedError("m", retry_after_s=7)).headers == {"retry-after": "7", "x-should-retry": "true"}
    for passing in (EngineUnavailableError("m"), EngineStartingError("m"), NotBegunError("m"), ShuttingDownError("m")):
        assert describe(passing).headers == {"retry-after": "1", "x-should-retry": "true"}
    assert describe(EngineUnavailableError("m", None)).headers == {"x-should-retry": "false"}
    assert describe(EngineError("m")).headers == {"x-should-retry": "false"}
    assert describe(AuthenticationError("m")).headers == {"www-authenticate": "Bearer"}


def test_an_error_event_is_followed_by_the_end() -> None:
    assert describe(EngineError("m")).events().startswith(b'data: {"error":{"message":"m"')
    assert describe(EngineError("m")).events().endswith(b"}\n\ndata: [DONE]\n\n")


def test_a_million_wrong_entries_are_one_problem() -> None:
    """Neither time nor memory for what nobody reads."""
    wrong = [None] * 1_000_000
    bodies: list[tuple[type[BaseModel], str, Any]] = [
        *((CompletionRequest, name, wrong) for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")),
        (CompletionRequest, "logit_bias", dict.fromkeys(map(str, range(1_000_000)))),
        (CompletionRequest, "temperature", wrong),
        (CompletionRequest, "request_id", {"a": [wrong] * 5}),
        (ChatRequest, "messages", wrong),
        (ChatRequest, "documents", wrong),
        (TokenizeRequest, "messages", wrong),
        (DetokenizeRequest, "tokens", wrong),
    ]
    for model, name, value in bodies:
        started = time.thread_time()
        with pytest.raises(ValidationError) as caught:
            model.model_validate({name: value})
        reply = describe(caught.value)
        assert time.thread_time() - started < 1.0
        assert caught.value.error_count() <= 3
        assert name in reply.message
        assert len(reply.message) < 1500


class _Model(BaseModel):
    model_config = ConfigDict(strict=True)

    n: int
    stop: str | list[str] | None = None
    bias: dict[str, float] | None = None


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "n"), ({"n": "x"}, "n"), ({"n": 1, "stop": [1]}, "stop"), ({"n": 1, "bias": {"7": "x"}}, "bias.7")],
)
def test_validation_errors_name_the_field(body: dict[str, object], param: str) -> None:
    with pytest.raises(ValidationError) as caught:
        _Model.model_validate(body)
    reply = describe(caught.value)
    assert (reply.status, reply.param, reply.code) == (400, param, "invalid_type")
    assert reply.message.startswith(param)


def test_long_inputs_are_cut_and_long_lists_of_errors_too() -> None:
    with pytest.raises(ValidationError) as caught:
        _Model.model_validate({"n": 1, "stop": [0] * 1000, "bias": {str(index): "x" * 5000 for index in range(30)}})
    reply = describe(caught.value)
    assert len(reply.message) < 5000
    assert reply.message.count(";") < 11
