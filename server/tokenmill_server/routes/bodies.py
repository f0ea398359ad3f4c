"""Request bodies: read within a limit, strictly parsed, typed. And the JSON answer."""

import asyncio
import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_server.errors import BodyTooLargeError, UnsupportedEncodingError
from tokenmill_server.processing.sse import json_bytes
from tokenmill_server.routes.headers import header

ModelT = TypeVar("ModelT", bound=BaseModel)
Json = dict[str, Any]

_MAX_INLINE_VALUES = 2000
"""About 4 ms of work."""
_JSON_TYPE = re.compile(r"^application/([\w.+-]+\+)?json\s*(;|$)", re.IGNORECASE)


async def read_json(request: Request, max_bytes: int) -> Json:
    """The body, which must be a JSON object declared as JSON. NaN, infinities and numbers out of range are no JSON.

    Raises InvalidRequestError, BodyTooLargeError or UnsupportedEncodingError.
    """
    content_type = header(request, b"content-type")
    if not _JSON_TYPE.match(content_type):
        raise InvalidRequestError(
            f"the content type must be application/json, got {content_type[:100]!r}", code="invalid_content_type"
        )
    encoding = header(request, b"content-encoding", "identity")
    if encoding != "identity":
        raise UnsupportedEncodingError(f"content encoding {encoding[:100]!r} is not supported; send the body as it is")
    data = await _read_body(request, max_bytes)
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise InvalidRequestError("the body is nested too deeply", code="invalid_json") from error
    if not isinstance(body, dict):
        raise InvalidRequestError("the body must be a JSON object", code="invalid_json")
    return body


def parse(body: Json, model: type[ModelT]) -> ModelT:
    """Raises pydantic's ValidationError, which `errors.describe` words."""
    return model.model_validate(body)


def json_reply(body: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(json_bytes(body), media_type="application/json", headers=headers)


async def large_json_reply(build: Callable[[], Json], num_values: int, headers: dict[str, str]) -> Response:
    """`json_reply(build())`. An answer of many numbers is made in a thread: others need not wait for it."""
    if num_values <= _MAX_INLINE_VALUES:
        return json_reply(build(), headers)
    return await asyncio.to_thread(lambda: json_reply(build(), headers))


async def _read_body(request: Request, max_bytes: int) -> bytes:
    declared = header(request, b"content-length")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise BodyTooLargeError(f"the body has {declared} bytes, more than the limit of {max_bytes}")
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise InvalidRequestError("the client went away while sending")
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise BodyTooLargeError(f"the body has more bytes than the limit of {max_bytes}")
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)
