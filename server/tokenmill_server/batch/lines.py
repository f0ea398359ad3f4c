"""Lines of OpenAI's batch files: requests that are read, answers that are written. Knows nothing of files or servers.

Format: https://platform.openai.com/docs/guides/batch. Of several answers each has a `custom_id` of its own.
"""

import uuid
from dataclasses import dataclass
from typing import Any

import msgspec

from tokenmill_engine.errors import TokenmillError

ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
)
"""What a line may ask for; one that the server has not got is its 404."""

Key = str | int
"""What tells answers apart: the `custom_id`; the number of a line that has none of its own."""

_MAX_SHOWN = 200


class BadLineError(TokenmillError):
    """A line that cannot be sent. `custom_id` is None if it has none of its own."""

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


@dataclass(slots=True, frozen=True)
class BatchRequest:
    """A line to be sent."""

    custom_id: str
    url: str
    body: bytes


class Failure(msgspec.Struct, frozen=True):
    """Why there is no answer of use."""

    code: str
    message: str
    line: int | None = None
    """Number of an input line that could not be sent."""


class Response(msgspec.Struct, frozen=True):
    """What the server said."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class Answer(msgspec.Struct, frozen=True):
    """A line of the output."""

    id: str
    custom_id: str | None
    response: Response | None
    error: Failure | None


class _Request(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


class _Written(msgspec.Struct):
    """What matters of a line of the output that is there already."""

    custom_id: str | None
    response: dict[str, Any] | None
    error: Failure | None


_decode_request = msgspec.json.Decoder(_Request).decode
_decode_written = msgspec.json.Decoder(_Written).decode


def read_request(line: bytes) -> BatchRequest:
    """Raises BadLineError."""
    try:
        request = _decode_request(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadLineError(f"no line of a batch: {error}", _custom_id_in(line)) from None
    problem = None
    if not request.custom_id:
        raise BadLineError("custom_id is empty")
    if request.method != "POST":
        problem = f"method must be POST, got {request.method[:_MAX_SHOWN]!r}"
    elif request.url not in ROUTES:
        problem = f"url must be one of {', '.join(ROUTES)}, got {request.url[:_MAX_SHOWN]!r}"
    elif request.body.get("stream"):
        problem = "stream is not for batches: leave it out"
    if problem is not None:
        raise BadLineError(problem, request.custom_id)
    return BatchRequest(request.custom_id, request.url, msgspec.json.encode(request.body))


def _custom_id_in(line: bytes) -> str | None:
    try:
        fields = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    custom_id = fields.get("custom_id") if isinstance(fields, dict) else None
    return custom_id if isinstance(custom_id, str) and custom_id else None


def key_of(answer: Answer) -> Key:
    """Raises ValueError for an answer without a key."""
    return _key(answer.custom_id, answer.error)


def read_written(line: bytes) -> tuple[Key, bool]:
    """The key of a line that was written before, and whether it tells of a failure.

    Raises:
        ValueError: it is none.
    """
    try:
        written = _decode_written(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return _key(written.custom_id, written.error), written.error is not None


def _key(custom_id: str | None, error: Failure | None) -> Key:
    if custom_id is not None:
        return custom_id
    if error is None or error.line is None:
        raise ValueError("neither a custom_id nor a line's number")
    return error.line


def unsent(number: int, problem: BadLineError) -> Answer:
    """The answer to a line that could not be sent."""
    return Answer(_new_id(), problem.custom_id, None, Failure("invalid_line", str(problem), number))


def unanswered(request: BatchRequest, code: str, message: str) -> Answer:
    """The answer to a line for which there is no reply."""
    return Answer(_new_id(), request.custom_id, None, Failure(code, message))


def answered(request: BatchRequest, status: int, request_id: str, body: bytes) -> Answer:
    """The answer that a server gave."""
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        text = body.decode("utf-8", "replace")[:_MAX_SHOWN]
        return unanswered(request, "invalid_reply", f"HTTP {status} with a body that is no JSON: {text!r}")
    if b"\n" in body:  # a line of the output is one line
        body = msgspec.json.encode(parsed)
    response = Response(status, request_id, msgspec.Raw(body))
    return Answer(_new_id(), request.custom_id, response, None if status < 400 else _failure(status, parsed))


def _failure(status: int, body: Any) -> Failure:
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return Failure(f"http_{status}", f"HTTP {status}")
    code = error.get("code") or error.get("type") or f"http_{status}"
    return Failure(str(code), str(error.get("message") or f"HTTP {status}"))


def _new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"
