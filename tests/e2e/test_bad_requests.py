"""Requests that once broke servers, against a real engine. After each the server must be as it was before."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.server import Server, check_error
from tests.support.streams import BackgroundStream, read_stream
from tests.support.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.slow


@pytest.fixture
def server(tiny_server: Server) -> Iterator[Server]:
    yield tiny_server
    tiny_server.check_idle()
    tiny_server.check_alive()


@pytest.mark.parametrize("prompt", ["", [""], [], [[]]])
def test_empty_prompts(server: Server, prompt: Any) -> None:
    check_error(server.post("/v1/completions", prompt=prompt, max_tokens=4), 400)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
@pytest.mark.parametrize("body", ["[]", "null", "true", "123", '"x"', "{", "", "\xff"])
def test_bodies_that_are_no_objects(server: Server, path: str, body: str) -> None:
    response = server.http.post(path, content=body.encode("latin-1"), headers={"Content-Type": "application/json"})
    check_error(response, 400)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", '"hot"', "[]"])
@pytest.mark.parametrize(
    "field",
    ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"],
)
def test_numbers_that_are_none(tiny_server: Server, field: str, value: str) -> None:
    sent = f'{{"5": {value}}}' if field == "logit_bias" else value
    body = f'{{"prompt": "a", "max_tokens": 2, "{field}": {sent}}}'
    response = tiny_server.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    check_error(response, 400)


def test_numbers_that_are_none_leave_others_alone(server: Server) -> None:
    alone = server.text("neighbour", max_tokens=400, ignore_eos=True)
    fields = {"prompt": "neighbour", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    neighbour = BackgroundStream(server.url, "/v1/completions", **fields)
    neighbour.wait_for_events()
    bodies = [{"logit_bias": {key: 5}} for key in ("99999999", "-1", "abc", str(VOCAB_SIZE))]
    bodies += [{"prompt": [VOCAB_SIZE]}, {"stop_token_ids": [VOCAB_SIZE]}, {"n": 10**9}, {"max_tokens": -1}]
    for body in bodies:
        check_error(server.post("/v1/completions", **{"prompt": "a", "max_tokens": 2, **body}), 400)
    response = server.http.post(
        "/v1/completions", content='{"prompt": "a", "temperature": NaN}', headers={"Content-Type": "application/json"}
    )
    check_error(response, 400)
    assert neighbour.result(60).text() == alone


def test_scoring_a_prompt(server: Server) -> None:
    prompt = "Your answer: Yes"
    result = server.complete(prompt, max_tokens=0, echo=True, logprobs=1)
    choice, logprobs = result["choices"][0], result["choices"][0]["logprobs"]
    assert choice["text"] == prompt
    assert len(logprobs["tokens"]) == result["usage"]["prompt_tokens"]
    assert result["usage"]["completion_tokens"] == 0
    assert logprobs["token_logprobs"][0] is None
    assert all(-1e4 < value <= 0 for value in logprobs["token_logprobs"][1:])


@pytest.mark.parametrize("stream", [False, True])
def test_masked_tokens_do_not_put_infinities_into_prompt_logprobs(server: Server, stream: bool) -> None:
    fields = {"prompt": "correct horse battery staple", "echo": True, "logprobs": 1, "top_k": 1, "max_tokens": 2}
    if stream:
        assert read_stream(server.url, "/v1/completions", fields).done
        return
    response = server.post("/v1/completions", **fields)
    assert response.status_code == 200

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(response.text, parse_constant=refuse)


@pytest.mark.parametrize("prompt", ["\n1. Carol has 20", "\n\n\n1. Carol", "東京 naïve 🙂🚀 café"])
def test_echoed_tokens_are_the_text(server: Server, prompt: str) -> None:
    choice = server.complete(prompt, echo=True, logprobs=1, max_tokens=5)["choices"][0]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert choice["text"].startswith(prompt)
    assert "".join(tokens) == choice["text"]
    assert offsets == [sum(map(len, tokens[:position])) for position in range(len(tokens))]


def test_prompt_that_ends_inside_a_character(server: Server) -> None:
    tokens = server.post("/tokenize", prompt="Hello world ").json()["tokens"]
    half = [
        token for token in range(VOCAB_SIZE) if server.post("/detokenize", tokens=[token]).json()["prompt"] == "\ufffd"
    ]
    fields = {"prompt": [*tokens, *half[:2]], "max_tokens": 8, "temperature": 0}
    whole = server.text(**fields)
    streamed = read_stream(server.url, "/v1/completions", fields)
    assert streamed.text() == whole
    assert not any("Hello" in choice["text"] for choice in streamed.choices())


def test_limits_inside_characters(server: Server) -> None:
    """Every length of a text full of broken and whole characters: the same streamed and not, and only the end of it
    may change with more tokens."""
    longest = server.text("🦀 東京", max_tokens=24, ignore_eos=True)
    for limit in range(1, 25):
        fields = {"prompt": "🦀 東京", "max_tokens": limit, "temperature": 0, "ignore_eos": True}
        whole = server.text(**fields)
        assert read_stream(server.url, "/v1/completions", fields).text() == whole
        assert longest.startswith(whole.rstrip("\ufffd"))


def test_continuing_the_last_message_with_its_space(server: Server) -> None:
    for text in ("OK!\n", "OK! "):
        messages = [{"role": "user", "content": "Ready?"}, {"role": "assistant", "content": text}]
        flags = {"add_generation_prompt": False, "continue_final_message": True}
        reply = server.post("/v1/chat/completions", messages=messages, max_tokens=2, **flags)
        assert reply.status_code == 200
        rendered = f"<|im_start|>user\nReady?<|im_end|>\n<|im_start|>assistant\n{text}"
        count = server.post("/tokenize", prompt=rendered, add_special_tokens=False).json()["count"]
        assert reply.json()["usage"]["prompt_tokens"] == count
        both = {"add_generation_prompt": True, "continue_final_message": True}
        check_error(server.post("/v1/chat/completions", messages=messages, **both), 400)


def test_choices_with_one_seed_differ_and_repeat(server: Server) -> None:
    fields = {"n": 4, "seed": 7, "temperature": 1, "max_tokens": 32}
    first, second = ([choice["text"] for choice in server.complete("Once", **fields)["choices"]] for _ in range(2))
    assert first == second
    assert len(set(first)) >= 2


def test_streamed_choices_end_one_by_one(server: Server) -> None:
    fields = {"prompt": "Once", "n": 4, "seed": 3, "temperature": 1, "max_tokens": 60, "stop": ["e", "o"]}
    whole = server.complete(**fields)
    stream = read_stream(server.url, "/v1/completions", {**fields, "stream_options": {"include_usage": True}})
    for index, choice in enumerate(whole["choices"]):
        assert stream.text(index) == choice["text"]
        assert stream.finish_reasons(index) == [choice["finish_reason"]]
    assert stream.events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_stop_strings_leave_no_trace(server: Server) -> None:
    text = server.text("Once", max_tokens=60, ignore_eos=True)
    stop = text[20:26]
    cut = text[: text.index(stop)]
    stream = read_stream(
        server.url,
        "/v1/completions",
        {"prompt": "Once", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stop": [stop]},
    )
    assert stream.text() == cut
    assert stream.finish_reasons() == ["stop"]
    false_start = stop[:-1] + "\x00"
    assert server.text("Once", max_tokens=60, ignore_eos=True, stop=[false_start]) == text


def test_unknown_routes_and_methods(server: Server) -> None:
    for response in (server.http.get("/v1/nothing"), server.post("/v2/chat/completions")):
        check_error(response, 404)
    check_error(server.http.get("/v1/completions"), 405)


def test_wrong_content_type(server: Server) -> None:
    check_error(
        server.http.post("/v1/completions", content='{"prompt": "a"}', headers={"Content-Type": "text/plain"}), 400
    )


@pytest.mark.parametrize(
    "data",
    [b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\n\r\n"],
)
def test_garbage_on_the_port(server: Server, data: bytes) -> None:
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port or 0), timeout=5) as connection:
        connection.sendall(data)
