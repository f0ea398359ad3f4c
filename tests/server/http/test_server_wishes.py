"""Wishes of the server's owner that hold for every request."""

from collections.abc import Iterator

import httpx
import pytest

from tests.support.api_server import run_server
from tests.support.sse import is_error, post_stream

pytestmark = pytest.mark.slow

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
TEMPLATE = "{{ greeting }}, {{ name }}: {{ messages[0].content }}"


@pytest.fixture(scope="module")
def owned() -> Iterator[httpx.Client]:
    wishes = {"force_include_usage": True, "return_tokens_as_token_ids": True, "disable_docs": True}
    kwargs = {"greeting": "Hello", "name": "you"}
    with (
        run_server(chat_template=TEMPLATE, default_chat_template_kwargs=kwargs, **wishes) as server,
        server.client() as client,
    ):
        yield client


@pytest.mark.parametrize("path", [PATH, CHAT])
def test_usage_in_every_chunk(owned: httpx.Client, client: httpx.Client, path: str) -> None:
    body = {"prompt": "one two", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    assert all("usage" in chunk for chunk in post_stream(owned, path, body).chunks)
    assert not any("usage" in chunk for chunk in post_stream(client, path, body).chunks)


def test_names_of_tokens(owned: httpx.Client, client: httpx.Client) -> None:
    body = {"prompt": [504], "max_tokens": 1, "logprobs": 0, "temperature": 0}

    def name(asked: httpx.Client, **fields: bool) -> str:
        return str(asked.post(PATH, json=body | fields).json()["choices"][0]["logprobs"]["tokens"][0])

    assert name(owned) == "token_id:504"
    assert name(owned, return_tokens_as_token_ids=False) == name(client) == "The"


def test_variables_of_the_template(owned: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "return_prompt_text": True}
    assert owned.post(CHAT, json=body).json()["prompt_text"] == "Hello, you: x"
    reply = owned.post(CHAT, json=body | {"chat_template_kwargs": {"name": "me"}}).json()
    assert reply["prompt_text"] == "Hello, me: x"


def test_no_pages_of_the_api(owned: httpx.Client, client: httpx.Client) -> None:
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert is_error(owned.get(path), 404)
        assert client.get(path).status_code == 200
