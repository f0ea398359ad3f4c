"""HTTPS, requests from pages of other origins, servers behind a proxy; templates that requests bring."""

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.api_server import MODEL_NAME, Server, run_server
from tests.support.certificates import make_certificate
from tests.support.server import PATIENCE_S
from tests.support.sse import is_error, post_stream

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
pytestmark = pytest.mark.slow

THREE = {"model": MODEL_NAME, "prompt": "one two three", "max_tokens": 4, "temperature": 0}
KEY = {"Authorization": "Bearer secret"}
ORIGIN = "https://chat.example"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """HTTPS, CORS, a prefix of paths, a key, and trust in templates: none of them is in the way of another."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = make_certificate(folder)
    options = {"allowed_origins": (ORIGIN,), "root_path": "/llm", "api_keys": ("secret",)}
    with run_server(ssl_certfile=certificate, ssl_keyfile=key, trust_request_chat_template=True, **options) as server:
        yield server, Path(certificate)


@pytest.fixture(scope="module")
def browser(secured: tuple[Server, Path]) -> Iterator[httpx.Client]:
    server, certificate = secured
    context = ssl.create_default_context(cafile=certificate)
    url = f"https://localhost:{server.port}"
    with httpx.Client(base_url=url, verify=context, timeout=PATIENCE_S, headers=KEY, trust_env=False) as client:
        yield client


def test_https(browser: httpx.Client, secured: tuple[Server, Path]) -> None:
    assert browser.post(PATH, json=THREE).json()["choices"][0]["text"] == "one two threeone"
    streamed = post_stream(browser, PATH, THREE | {"max_tokens": 300})
    assert streamed.text() == ("one two three" * 100)
    with secured[0].client() as plain, pytest.raises(httpx.TransportError):
        plain.get("/health")
    assert browser.get("/health").status_code == 200


def test_broken_http_over_tls_is_answered(secured: tuple[Server, Path]) -> None:
    server, certificate = secured
    context = ssl.create_default_context(cafile=certificate)
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection,
        context.wrap_socket(connection, server_hostname="localhost") as secure,
    ):
        secure.sendall(b"no http\r\n\r\n")
        assert secure.recv(1000).startswith(b"HTTP/1.1 400")


def test_a_page_of_an_allowed_origin(browser: httpx.Client) -> None:
    ask = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST", "Authorization": ""}
    ask["Access-Control-Request-Headers"] = "authorization, content-type"
    allowed = browser.options(CHAT, headers=ask)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    assert allowed.headers["x-request-id"]
    answers = [
        browser.post(PATH, json=THREE | {"stream": stream}, headers={"Origin": ORIGIN}) for stream in (False, True)
    ]
    unknown = browser.post(PATH, json=THREE, headers={"Origin": ORIGIN, "Authorization": "Bearer wrong"})
    assert is_error(unknown, 401)
    for response in (*answers, unknown):
        assert response.headers["access-control-allow-origin"] == ORIGIN
        assert "x-request-id" in response.headers["access-control-expose-headers"]


def test_pages_of_other_origins(browser: httpx.Client, client: httpx.Client) -> None:
    ask = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in browser.options(CHAT, headers=ask).headers
    for each in (browser, client):
        response = each.post(PATH, json=THREE, headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in response.headers


def test_paths_with_the_proxys_prefix_and_without(browser: httpx.Client, client: httpx.Client) -> None:
    for prefix in ("", "/llm"):
        assert browser.post(prefix + PATH, json=THREE).status_code == 200
        assert browser.get(f"{prefix}/v1/models/{MODEL_NAME}").status_code == 200
        assert browser.get(f"{prefix}/health", headers={"Authorization": ""}).status_code == 200
        assert is_error(browser.get(f"{prefix}/v1/models", headers={"Authorization": ""}), 401)
    assert is_error(browser.get("/llmv1/models"), 404)
    for path in (
        "//v1/models",
        "/V1/models",
        "/llm/llm/v1/models",
        "/llm//v1/models",
        "/LLM/v1/models",
        "/llm/health/",
    ):
        assert is_error(browser.get(path, headers={"Authorization": ""}), 401), path
        assert is_error(browser.options(path, headers={"Authorization": ""}), 401), path
    assert browser.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]
    assert is_error(client.get("/llm/v1/models"), 404)


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ eos_token }}"
MESSAGES = [{"role": "system", "content": "one"}, {"role": "user", "content": "two"}]


def test_a_template_of_the_request(browser: httpx.Client, client: httpx.Client) -> None:
    body = {"messages": MESSAGES, "max_tokens": 2, "return_prompt_text": True}
    for _ in range(2):  # compiled, and found again
        reply = browser.post(CHAT, json=body | {"chat_template": TEMPLATE}).json()
        assert reply["prompt_text"] == "<system>one<user>two<|im_end|>"
    tokens = browser.post("/tokenize", json={"messages": MESSAGES, "chat_template": TEMPLATE}).json()["tokens"]
    assert reply["usage"]["prompt_tokens"] == len(tokens)
    for wrong in ("{% for %}", "x" * 70_000, "{{ messages[9].role.x }}", "{{ ''.__class__.__mro__ }}", 5):
        response = browser.post(CHAT, json=body | {"chat_template": wrong})
        assert is_error(response, 400), wrong
        assert response.json()["error"]["param"] in ("chat_template", "messages")
    for path in (CHAT, "/tokenize"):
        refused = client.post(path, json={"messages": MESSAGES, "chat_template": TEMPLATE})
        assert is_error(refused, 400, "chat_template", "unsupported_parameter")
        assert "--trust-request-chat-template" in refused.json()["error"]["message"]


def test_the_text_of_the_prompt(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "two"}], "max_tokens": 2, "return_prompt_text": True}
    text = client.post(CHAT, json=body).json()["prompt_text"]
    assert text.endswith("<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n")
    chunks = post_stream(client, CHAT, body).chunks
    assert [chunk.get("prompt_text") for chunk in chunks] == [text, *[None] * (len(chunks) - 1)]
    cut = client.post(CHAT, json=body | {"truncate_prompt_tokens": 3}).json()
    assert text.endswith(cut["prompt_text"])
    assert len(cut["prompt_text"]) < len(text)
    assert "prompt_text" not in client.post(CHAT, json=body | {"return_prompt_text": False}).json()
