import json
from typing import Any

import msgspec
import pytest

from tokenmill_server.batch.lines import (
    BadLineError,
    answered,
    key_of,
    read_request,
    read_written,
    unanswered,
    unsent,
)

LINE: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi", "n": 2}}


def encoded(**changes: Any) -> bytes:
    return json.dumps({**LINE, **changes}).encode()


def test_a_line_becomes_a_request() -> None:
    request = read_request(encoded(unknown=1) + b"\r\n")
    assert (request.custom_id, request.url) == ("a", "/v1/completions")
    assert json.loads(request.body) == {"prompt": "Hi", "n": 2}


@pytest.mark.parametrize(
    ("line", "message", "custom_id"),
    [
        (b"nonsense", "JSON is malformed", None),
        (b'{"custom_id": "a"', "no line of a batch", None),
        (b"\xff\xfe", "no line of a batch", None),
        (b"[" * 100_000, "no line of a batch", None),
        (b"[1]", "no line of a batch", None),
        (b'{"custom_id": "a"}', "missing required field `method`", "a"),
        (encoded(custom_id=5), "Expected `str`, got `int` - at `$.custom_id`", None),
        (encoded(custom_id=""), "custom_id is empty", None),
        (encoded(method="GET"), "method must be POST, got 'GET'", "a"),
        (encoded(url="/v1/models"), "url must be one of /v1/chat/completions, ", "a"),
        (encoded(body=[]), "Expected `object`, got `array` - at `$.body`", "a"),
        (encoded(body={"stream": True}), "stream is not for batches", "a"),
        (b'{"custom_id": "a", "body": {"temperature": NaN}}', "no line of a batch", None),
    ],
)
def test_bad_lines_are_told_by_their_id_or_number(line: bytes, message: str, custom_id: str | None) -> None:
    with pytest.raises(BadLineError) as caught:
        read_request(line)
    assert message in str(caught.value)
    assert caught.value.custom_id == custom_id
    answer = unsent(7, caught.value)
    written = msgspec.json.encode(answer)
    assert read_written(written) == (custom_id or 7, True)
    assert json.loads(written)["error"] == {"code": "invalid_line", "message": str(caught.value), "line": 7}


def test_answers_as_they_are_written() -> None:
    request = read_request(encoded())
    good = msgspec.json.encode(answered(request, 200, "r", b'{\n "text": "\\u00e9"\n}'))
    assert b"\n" not in good
    fields = json.loads(good)
    assert fields.pop("id").startswith("batch_req_")
    response = {"status_code": 200, "request_id": "r", "body": {"text": "é"}}
    assert fields == {"custom_id": "a", "response": response, "error": None}
    assert read_written(good) == ("a", False)

    refused = {"error": {"message": "too long", "type": "invalid_request_error", "param": None, "code": None}}
    failed = answered(request, 400, "r", json.dumps(refused).encode())
    fields = json.loads(msgspec.json.encode(failed))
    assert fields["response"] == {"status_code": 400, "request_id": "r", "body": refused}
    assert fields["error"] == {"code": "invalid_request_error", "message": "too long", "line": None}
    assert key_of(failed) == "a"


@pytest.mark.parametrize(
    ("body", "code"), [(b"<html>", "invalid_reply"), (b"[]", "http_502"), (b"\xff", "invalid_reply")]
)
def test_answers_that_are_none_of_this_api(body: bytes, code: str) -> None:
    answer = answered(read_request(encoded()), 502, "r", body)
    assert answer.error is not None
    assert answer.error.code == code
    assert read_written(msgspec.json.encode(answer)) == ("a", True)


def test_ids_differ() -> None:
    request = read_request(encoded())
    assert len({unanswered(request, "c", "m").id for _ in range(100)}) == 100


@pytest.mark.parametrize("line", [b"{}", b'{"custom_id": null, "response": null, "error": null}', b"1", b"{", b"\0\0"])
def test_what_is_no_answer(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_written(line)
