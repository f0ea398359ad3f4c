"""Bodies, errors, keys, ids, and the routes around generation."""

import contextlib
import json
import re
import socket
from typing import Any

import httpx
import pytest

from tests.support.api_server import MODEL_NAME, Server, run_server
from tests.support.sse import is_error
from tokenmill_server.processing.tokenizer import Tokenizer

PATHS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
GOOD = {"prompt": "one two", "max_tokens": 2}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body", ["[]", "null", "true", "123", '"x"', "{", "", "{}}", "[" * 5000, '{"a": "\\ud800"}', b"\xff\xfe", b"\x00"]
)
def test_bodies_that_are_no_json_object(client: httpx.Client, path: str, body: str | bytes) -> None:
    response = client.post(path, content=body, headers={"content-type": "application/json"})
    assert is_error(response, 400, code="invalid_json")
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"])
def test_wrong_content_type(client: httpx.Client, content_type: str) -> None:
    headers = {"content-type": content_type}
    assert is_error(client.post("/v1/completions", content=json.dumps(GOOD), headers=headers), 400)


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/x+json"])
def test_right_content_type(client: httpx.Client, content_type: str) -> None:
    headers = {"content-type": content_type}
    assert client.post("/v1/completions", content=json.dumps(GOOD), headers=headers).status_code == 200


def test_compressed_bodies(client: httpx.Client) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    assert is_error(client.post("/v1/completions", content=b"x", headers=headers), 415)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/v1/nothing", 404),
        ("GET", "/v1/chat/completions/", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/nobody", 404),
    ],
)
def test_unknown_routes_and_methods(client: httpx.Client, method: str, path: str, status: int) -> None:
    response = client.request(method, path, headers={"X-Request-Id": "mine"})
    assert is_error(response, status)
    assert response.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/audio/speech", "/v1/messages"])
def test_routes_of_others_are_answered_with_ours(client: httpx.Client, path: str) -> None:
    response = client.post(path, json={"model": MODEL_NAME, "input": "x"})
    assert is_error(response, 404, code="not_found")
    message = response.json()["error"]["message"]
    assert message.startswith(f"this server does not serve '{path}' yet; it serves /v1/chat/completions, ")
    assert "/v1/models/{model_id}" in message


def test_every_operation_has_an_id_of_its_own(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    ids = [operation["operationId"] for operations in paths.values() for operation in operations.values()]
    assert len(ids) == len(set(ids)) >= 11


def references(value: Any) -> set[str]:
    """Everything that a document refers to."""
    if isinstance(value, list):
        return set().union(*map(references, value))
    if not isinstance(value, dict):
        return set()
    return set().union(*map(references, value.values())) | {value["$ref"] for _ in range("$ref" in value)}


def test_the_description_is_whole(client: httpx.Client) -> None:
    """What it refers to is there, bodies, names in paths and errors included; no keys are wanted of this server."""
    document = client.get("/openapi.json").json()
    found = references(document)
    assert {"#/components/schemas/ChatRequest", "#/components/schemas/Error"} <= found
    for reference in found:
        place = document
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]
    paths = document["paths"]
    for path, operations in paths.items():
        for operation in operations.values():
            named = [parameter["name"] for parameter in operation.get("parameters", [])]
            assert named == re.findall(r"{(\w+)}", path)
            assert {"200", "4XX", "5XX"} <= operation["responses"].keys()
    assert paths["/v1/chat/completions"]["post"]["responses"]["200"]["content"].keys() == {
        "application/json",
        "text/event-stream",
    }
    assert "securitySchemes" not in document["components"]


def test_a_wrong_method_is_told_all_right_ones(client: httpx.Client) -> None:
    for path, methods in (("/ping", "GET, HEAD, POST"), ("/v1/models/x", "GET, HEAD"), ("/v1/completions", "POST")):
        response = client.request("DELETE", path)
        assert is_error(response, 405, code="method_not_allowed")
        assert response.headers["allow"] == methods


def test_unknown_model(client: httpx.Client) -> None:
    for path in PATHS:
        body = {**GOOD, "messages": [{"role": "user", "content": "x"}], "tokens": [1], "model": "nobody"}
        assert is_error(client.post(path, json=body), 404, "model", "model_not_found")


@pytest.mark.parametrize("model", [MODEL_NAME, "other/name", "", None])
def test_every_served_name_answers_under_the_first(client: httpx.Client, model: str | None) -> None:
    assert client.post("/v1/completions", json=GOOD | {"model": model}).json()["model"] == MODEL_NAME


def test_models(client: httpx.Client) -> None:
    models = client.get("/v1/models").json()
    assert [model["id"] for model in models["data"]] == [MODEL_NAME, "other/name"]
    assert client.get("/v1/models/other/name").json() == models["data"][1]
    assert client.get("/v1/models/").json() == models
    assert models["data"][0]["max_model_len"] == 8192


def test_tokenize_and_back(client: httpx.Client, tokenizer: Tokenizer) -> None:
    body = client.post("/tokenize", json={"prompt": "Hello 🦄", "return_token_strs": True}).json()
    assert body["tokens"] == tokenizer.encode("Hello 🦄")
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == 8192
    assert client.post("/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": "Hello 🦄"}
    assert client.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []


def test_tokenize_a_conversation(client: httpx.Client, tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "A"}, {"role": "user", "content": "B"}]
    body = client.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    assert tokenizer.decode(body["tokens"], False) == "<|im_start|>system\nA<|im_end|>\n<|im_start|>user\nB<|im_end|>\n"
    assert body["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"prompt": "a", "messages": []}),
        ("/tokenize", {"messages": []}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": "x"}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [49152]}),
        ("/detokenize", {"tokens": [1] * (4 * 8192 + 1)}),
        ("/tokenize", {"prompt": "x" * 10_000_000}),
    ],
)
def test_malformed_tokenize_requests(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    assert is_error(client.post(path, json=body), 400)


def answer_to(server: Server, request: bytes) -> bytes:
    """Everything until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(request)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while data := connection.recv(65536):
                answer += data
    return answer


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        (b"".join(b"X-%d: a\r\n" % number for number in range(300)), b"431", "headers_too_large"),
        (b"X-Long: " + b"a" * 300_000 + b"\r\n", b"431", "headers_too_large"),
        (b"X-Endless: " + b"a" * 600_000, b"431", "headers_too_large"),
        (b"no header\r\n", b"400", "invalid_http"),
    ],
)
def test_heads_that_are_too_large_or_none(server: Server, head: bytes, status: bytes, code: str) -> None:
    end = b"" if head.startswith(b"X-Endless") else b"\r\n"
    answer = answer_to(server, b"GET /health HTTP/1.1\r\nHost: x\r\n" + head + end)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == code
    assert b"\r\nx-request-id: " in answer


def test_heads_within_the_limits(client: httpx.Client) -> None:
    assert client.get("/health", headers={f"x-{number}": "a" * 900 for number in range(200)}).status_code == 200


def test_operations(client: httpx.Client) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ping").status_code == client.post("/ping").status_code == 200
    assert client.get("/version").json() == {"version": "0.1.0"}
    assert "/v1/chat/completions" in client.get("/openapi.json").json()["paths"]


@pytest.mark.parametrize("path", ["/health", "/ping", "/v1/models", f"/v1/models/{MODEL_NAME}", "/version", "/metrics"])
def test_head_is_get_without_a_body(client: httpx.Client, path: str) -> None:
    head, get = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


def test_http_1_0_streams_end_with_the_connection(server: Server) -> None:
    body = json.dumps(GOOD | {"stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    answer_head, _, events = answer_to(server, head % len(body) + body).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in answer_head
    assert b"connection: close" in answer_head
    assert events.startswith(b"data: {")
    assert events.endswith(b"}\n\ndata: [DONE]\n\n")


def test_request_ids(client: httpx.Client) -> None:
    """The client's id is echoed, and is a label only: it may be in flight twice."""
    for request_id in ("mine-1", "mine-1"):
        response = client.post("/v1/completions", json=GOOD, headers={"X-Request-Id": request_id})
        assert response.headers["x-request-id"] == "mine-1"
        assert response.json()["id"] == "cmpl-mine-1"
    in_body = client.post("/v1/completions", json=GOOD | {"request_id": "in-body"})
    assert (in_body.headers["x-request-id"], in_body.json()["id"]) == ("in-body", "cmpl-in-body")
    both = client.post("/v1/completions", json=GOOD | {"request_id": "in-body"}, headers={"X-Request-Id": "header"})
    assert both.headers["x-request-id"] == "header"
    made_up = [client.get("/health").headers["x-request-id"] for _ in range(2)]
    assert made_up[0] != made_up[1]
    assert len(client.get("/health", headers={"X-Request-Id": "x" * 300}).headers["x-request-id"]) == 32


def test_metrics_count_requests_by_route(client: httpx.Client) -> None:
    def count() -> float:
        wanted = 'http_requests_total{handler="/v1/models/{model_id:path}",method="GET",status="4xx"} '
        lines = client.get("/metrics").text.splitlines()
        return sum(float(line.removeprefix(wanted)) for line in lines if line.startswith(wanted))

    before = count()
    client.get("/v1/models/nobody-1")
    client.get("/v1/models/nobody-2")
    assert count() == before + 2


def test_metrics_of_tokens(client: httpx.Client) -> None:
    def values() -> dict[str, float]:
        lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith("tokenmill:")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    labels = '{engine="0",model_name="smol"}'
    before = values()
    client.post("/v1/completions", json=GOOD | {"max_tokens": 7, "n": 2})
    after = values()
    gained = {name: after[name] - before[name] for name in after}
    assert gained[f"tokenmill:time_to_first_token_seconds_count{labels}"] == 1
    assert gained[f"tokenmill:inter_token_latency_seconds_count{labels}"] == 12
    assert gained[f"tokenmill:e2e_request_latency_seconds_count{labels}"] == 1
    assert gained[f"tokenmill:request_params_n_sum{labels}"] == 2
    assert gained[f"tokenmill:request_max_num_generation_tokens_sum{labels}"] == 7


@pytest.mark.slow
def test_api_keys_guard_everything_but_health() -> None:
    with run_server(api_keys=("secret", "other key"), max_body_bytes=1000) as server, server.client() as client:
        paths = [
            *("/v1/models", "/v1/chat/completions", "/metrics", "/version", "/tokenize", "/openapi.json", "/docs"),
            *("/v1//models", "/V1/models", "/nothing", "/health/", f"{server.url}//health", "/health/../v1/models"),
            *("/webui/server.json", f"{server.url}//", "/webui"),
        ]
        for path in paths:
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": "Bearer"},
                {"Authorization": "secret"},
            ):
                for method in ("GET", "POST", "OPTIONS"):
                    response = client.request(method, path, headers=headers)
                    assert is_error(response, 401, code="invalid_api_key")
                    assert response.headers["www-authenticate"] == "Bearer"
        for key in ("Bearer secret", "bearer other key"):
            assert client.get("/v1/models", headers={"Authorization": key}).status_code == 200
        assert client.get("/health").status_code == client.post("/ping").status_code == 200
        described = client.get("/openapi.json", headers={"Authorization": "Bearer secret"}).json()["paths"]
        free = {path for path, each in described.items() if not all("security" in one for one in each.values())}
        assert free == {"/health", "/ping"}
        large = {"prompt": "x" * 2000}
        headers = {"Authorization": "Bearer secret"}
        assert is_error(client.post("/v1/completions", json=large, headers=headers), 413, code="request_too_large")
        chunked = (part for part in [b"x" * 600, b"x" * 600])
        headers["content-type"] = "application/json"
        assert is_error(client.post("/v1/completions", content=chunked, headers=headers), 413)


@pytest.mark.slow
def test_two_servers_on_one_machine(server: Server) -> None:
    """Two servers on one machine do not meet each other's engines."""
    with run_server(served_model_names=("second",)) as second, second.client() as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "second"
        assert client.post("/v1/completions", json=GOOD).json()["model"] == "second"
        with server.client() as first:
            assert first.post("/v1/completions", json=GOOD).json()["model"] == MODEL_NAME
