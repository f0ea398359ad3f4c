"""From exceptions to HTTP: the one table of statuses, and OpenAI's error body."""

from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException

from tokenmill_engine.errors import (
    AuthenticationError,
    DeadlineError,
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
from tokenmill_server.processing.shown import shown
from tokenmill_server.processing.sse import DONE, event, json_bytes

_MAX_LISTED_ERRORS = 10
_MAX_PATH_CHARS = 200


class BodyTooLargeError(RequestError):
    """The request body is longer than the server takes."""

    code = "request_too_large"


class UnsupportedEncodingError(RequestError):
    """The request body is compressed."""

    code = "unsupported_content_encoding"


class ShuttingDownError(OverloadedError):
    """The server takes no new work, or ends before an answer was complete; its successor may do better."""


@dataclass(slots=True, frozen=True)
class ErrorReply:
    """An error as HTTP tells it."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def json(self) -> bytes:
        return json_bytes(self.body())

    def events(self) -> bytes:
        """For a stream that has begun: the error, then the end."""
        return event(self.body()) + DONE


_INVALID = "invalid_request_error"
_SERVER = "server_error"

_TABLE: dict[type[Exception], tuple[int, str, str | None]] = {
    AuthenticationError: (401, _INVALID, None),
    NotFoundError: (404, _INVALID, None),
    BodyTooLargeError: (413, _INVALID, None),
    UnsupportedEncodingError: (415, _INVALID, None),
    InvalidRequestError: (400, _INVALID, "invalid_value"),
    RequestError: (400, _INVALID, "invalid_value"),
    EngineStartingError: (503, _SERVER, "engine_starting"),
    EngineUnavailableError: (503, _SERVER, "engine_unavailable"),
    NotBegunError: (503, _SERVER, "engine_unavailable"),
    ShuttingDownError: (503, _SERVER, "server_shutting_down"),
    OverloadedError: (503, _SERVER, "server_overloaded"),
    DeadlineError: (504, _SERVER, "deadline_exceeded"),
    EngineDeadError: (500, _SERVER, "engine_dead"),
    EngineError: (500, _SERVER, "engine_error"),
}
"""Exception class -> status, type, code where the exception has none of its own. The most special class counts."""

_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}


def describe(error: Exception) -> ErrorReply:
    """What a client is told about `error`. Nothing of what was not meant for clients gets out."""
    if isinstance(error, ValidationError):
        return _describe_validation(error)
    if isinstance(error, HTTPException):
        kind = _INVALID if error.status_code < 500 else _SERVER
        code = _HTTP_CODES.get(error.status_code)
        return ErrorReply(error.status_code, kind, error.detail, code=code, headers=dict(error.headers or {}))
    for kind_of_error in type(error).__mro__:
        if kind_of_error in _TABLE:
            status, kind, code = _TABLE[kind_of_error]
            break
    else:
        headers = {"x-should-retry": "false"}  # a fault of ours that the same request would meet again
        return ErrorReply(500, _SERVER, "internal server error", code="internal_error", headers=headers)
    headers = {}
    if isinstance(error, OverloadedError) and error.retry_after_s is not None:
        headers = {"retry-after": str(error.retry_after_s), "x-should-retry": "true"}
    elif isinstance(error, AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    elif type(error) is EngineError or isinstance(error, (OverloadedError, DeadlineError)):
        headers["x-should-retry"] = "false"  # the same request would fail again
    param = error.param if isinstance(error, RequestError) else None
    own_code = error.code if isinstance(error, RequestError) else None
    return ErrorReply(status, kind, str(error), param, own_code or code, headers)


def _describe_validation(error: ValidationError) -> ErrorReply:
    """Names the field; members of unions that were tried in vain are no part of its path."""
    problems = error.errors(include_url=False, include_context=False)
    lines = []
    for problem in problems[:_MAX_LISTED_ERRORS]:
        text = problem["msg"][0].lower() + problem["msg"][1:]
        got = "" if problem["type"] == "missing" else f", got {shown(problem['input'])}"
        lines.append(f"{_path(problem['loc'])}: {text}{got}")
    return ErrorReply(400, _INVALID, "; ".join(dict.fromkeys(lines)), _path(problems[0]["loc"]), "invalid_type")


_UNION_MEMBERS = {"str", "int", "float", "bool", "list[str]", "list[int]"}


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _UNION_MEMBERS and not part.startswith("function-"):
            path += f".{part}" if path else part
    return path[:_MAX_PATH_CHARS]
