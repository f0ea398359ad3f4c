"""Wishes of the server's owner that hold for every request."""

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.support.api_server import run_server
from tests.support.echo_engine import POISON
from tests.support.server import PATIENCE_S, wait_for
from tests.support.sse import is_error, post_stream
from tokenmill_engine.ipc.control import Drain

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


def test_comments_fill_the_silence_of_a_stream() -> None:
    """Clients skip them; what fails after one is told in the stream."""
    body = {"prompt": "one two three", "max_tokens": 4, "temperature": 0}
    with run_server(sse_keep_alive_s=0.05) as server, server.client() as client:
        engine = server.engines[0]
        engine.paused.set()
        with client.stream("POST", PATH, json=body | {"stream": True}) as response:
            lines = (line for line in response.iter_lines() if line)
            assert [next(lines) for _ in range(3)] == [": keep-alive"] * 3
            engine.paused.clear()
            events = [line for line in lines if line != ": keep-alive"]
        assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in events[:-1]) == "one two threeone"
        assert events[-1] == "data: [DONE]"
        engine.paused.set()
        with client.stream("POST", PATH, json=body | {"prompt": [POISON], "stream": True}) as response:
            lines = (line for line in response.iter_lines() if line)
            assert next(lines) == ": keep-alive"
            engine.paused.clear()
            events = [line for line in lines if line != ": keep-alive"]
        assert json.loads(events[0][6:])["error"]["code"] == "engine_error"
        assert events[1:] == ["data: [DONE]"]


def test_a_line_in_the_log_for_each_request(capfd: pytest.CaptureFixture[str]) -> None:
    """Also for those that fail or are left by their clients; with nothing of what was written."""
    body = {"prompt": "one two three secret", "max_tokens": 4, "temperature": 0}

    def line_of(request_id: str) -> str:
        logged = ""

        def is_logged() -> bool:
            nonlocal logged
            logged += capfd.readouterr().err
            return f"{request_id}: POST" in logged

        wait_for(is_logged, PATIENCE_S, "line in the log")
        assert "secret" not in logged
        return next(line for line in logged.splitlines() if f"{request_id}: POST" in line)

    with run_server(log_requests=True) as server, server.client() as client:
        for stream in (False, True):
            client.post(PATH, json=body | {"stream": stream}, headers={"X-Request-Id": f"good-{stream}"})
            line = line_of(f"good-{stream}")
            assert f"good-{stream}: POST {PATH}: status 200 after " in line
            assert line.endswith(" ms; 4 prompt tokens (0 cached), 4 generated (length)")
        client.post(PATH, json=body | {"top_p": 7}, headers={"X-Request-Id": "bad"})
        assert f"bad: POST {PATH}: status 400 after " in line_of("bad")
        server.engines[0].step_s = 0.01
        endless = body | {"max_tokens": 8000, "stream": True}
        with client.stream("POST", PATH, json=endless, headers={"X-Request-Id": "left"}) as response:
            next(response.iter_lines())
        assert line_of("left").endswith(" generated (not finished)")
    with run_server() as server, server.client() as client:
        client.post(PATH, json=body, headers={"X-Request-Id": "unlogged"})
        server.children[0].channel.send(Drain(1.0))
        assert server.children[0].process.wait(PATIENCE_S) == 0
    assert "unlogged" not in capfd.readouterr().err
