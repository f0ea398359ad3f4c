from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.support.api_server import MODEL_NAME, Server
from tests.support.sse import is_error, post_stream, strict_json
from tokenmill_server.processing.tokenizer import Tokenizer

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "Hi there"}
SYSTEM = {"role": "system", "content": "Be kind."}
RENDERED = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n"


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL_NAME, "messages": [SYSTEM, USER], "temperature": 0, "max_tokens": 6, **fields}


def test_answer(client: httpx.Client, tokenizer: Tokenizer) -> None:
    response = client.post(PATH, json=chat(ignore_eos=True, max_tokens=9))
    body = ChatCompletion.model_validate(strict_json(response.text))
    prompt = tokenizer.encode(RENDERED)
    assert body.model == MODEL_NAME
    assert body.id == f"chatcmpl-{response.headers['x-request-id']}"
    assert body.choices[0].message.content == tokenizer.decode(prompt[:9])
    assert body.choices[0].message.refusal is None
    assert body.choices[0].finish_reason == "length"
    assert body.usage is not None
    assert (body.usage.prompt_tokens, body.usage.completion_tokens) == (len(prompt), 9)
    assert body.usage.prompt_tokens_details is not None
    assert body.usage.prompt_tokens_details.cached_tokens == len(prompt) // 16 * 16


def test_end_token_and_its_reason(client: httpx.Client) -> None:
    body = client.post(PATH, json=chat(max_tokens=50)).json()
    choice = body["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert choice["message"]["content"] == "system\nBe kind."


def test_max_completion_tokens_wins_and_default_is_the_room_left(client: httpx.Client, server: Server) -> None:
    engine = server.engines[0]
    client.post(PATH, json=chat(max_tokens=6, max_completion_tokens=3))
    assert engine.added[-1].sampling.max_tokens == 3
    client.post(PATH, json=chat(max_tokens=None))
    prompt_length = len(engine.added[-1].prompt_token_ids) // 4
    assert engine.added[-1].sampling.max_tokens == 8192 - prompt_length


def test_stream_is_the_answer_in_chunks(client: httpx.Client) -> None:
    """Typed clients can read every chunk; role first, one finish reason last."""
    whole = client.post(PATH, json=chat(max_tokens=12)).json()
    stream = post_stream(client, PATH, chat(max_tokens=12))
    for chunk in stream.chunks:
        ChatCompletionChunk.model_validate(chunk)
        assert "usage" not in chunk
        assert isinstance(chunk["choices"], list)
    deltas = [choice["delta"] for choice in stream.choices()]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all("role" not in delta for delta in deltas[1:])
    assert stream.text() == whole["choices"][0]["message"]["content"]
    assert stream.finish_reason() == whole["choices"][0]["finish_reason"]


@pytest.mark.parametrize("n", [1, 3])
def test_usage_chunk(client: httpx.Client, n: int) -> None:
    """Usage in exactly one more chunk, without choices, and only if asked for."""
    body = chat(n=n)
    whole = client.post(PATH, json=body).json()["usage"]
    stream = post_stream(client, PATH, body | {"stream_options": {"include_usage": True}})
    assert stream.usage == whole
    assert stream.chunks[-1]["choices"] == []
    assert all("usage" not in chunk and chunk["choices"] for chunk in stream.chunks[:-1])
    assert all("usage" not in chunk for chunk in post_stream(client, PATH, body | {"stream_options": {}}).chunks)
    assert is_error(client.post(PATH, json=body | {"stream_options": {"include_usage": True}}), 400, "stream_options")


def test_continuous_usage(client: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = post_stream(client, PATH, chat(stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in stream.chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    alone = chat(stream=True, stream_options={"continuous_usage_stats": True})
    assert is_error(client.post(PATH, json=alone), 400, "stream_options")


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_stream_interval(client: httpx.Client, interval: int) -> None:
    body = chat(max_tokens=11, ignore_eos=True, stream_interval=interval, return_token_ids=True)
    stream = post_stream(client, PATH, body)
    sizes = [len(choice["token_ids"]) for choice in stream.choices() if "token_ids" in choice]
    assert sum(sizes) == 11
    assert sizes[0] == 1, "the first token does not wait"
    assert all(size == interval for size in sizes[1:-1])


def test_several_choices_stream_side_by_side(client: httpx.Client) -> None:
    """Every index ends once; a seed gives different choices and the same set again."""
    body = chat(n=4, seed=7, temperature=1, max_tokens=20, stop=["kind"])
    whole = client.post(PATH, json=body).json()
    again = client.post(PATH, json=body).json()
    stream = post_stream(client, PATH, body | {"stream_options": {"include_usage": True}})
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert texts == [choice["message"]["content"] for choice in again["choices"]]
    assert len(set(texts)) > 1
    assert [stream.text(index) for index in range(4)] == texts
    assert [stream.finish_reason(index) for index in range(4)] == [c["finish_reason"] for c in whole["choices"]]
    assert stream.usage == whole["usage"]


def test_continue_final_message_keeps_trailing_space(client: httpx.Client, tokenizer: Tokenizer) -> None:
    messages = [SYSTEM, USER, {"role": "assistant", "content": "OK!\n"}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    response = client.post(PATH, json=chat(messages=messages, **options))
    assert response.json()["usage"]["prompt_tokens"] == len(tokenizer.encode(RENDERED + "OK!\n"))
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert is_error(client.post(PATH, json=chat(messages=messages, **both)), 400, "continue_final_message")


def test_echo_puts_the_last_message_first(client: httpx.Client) -> None:
    body = chat(messages=[USER, {"role": "assistant", "content": "I say "}], echo=True)
    whole = client.post(PATH, json=body).json()["choices"][0]["message"]["content"]
    assert whole.startswith("I say ")
    assert post_stream(client, PATH, body).text() == whole


def test_logprobs(client: httpx.Client, tokenizer: Tokenizer) -> None:
    body = chat(logprobs=True, top_logprobs=2, ignore_eos=True)
    choice = client.post(PATH, json=body).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert "".join(bytes(entry["bytes"]).decode() for entry in content[1:]) == choice["message"]["content"]
    assert content[0]["token"] == "<|im_start|>"
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    streamed = post_stream(client, PATH, body).choices()
    assert [entry for chunk in streamed for entry in (chunk.get("logprobs") or {}).get("content", [])] == content
    named = client.post(PATH, json=body | {"return_tokens_as_token_ids": True}).json()
    first = named["choices"][0]["logprobs"]["content"][0]
    assert first["token"] == f"token_id:{tokenizer.encode(RENDERED)[0]}"


def test_prompt_logprobs(client: httpx.Client, tokenizer: Tokenizer) -> None:
    body = client.post(PATH, json=chat(prompt_logprobs=1)).json()
    ids = tokenizer.encode(RENDERED)
    assert len(body["prompt_logprobs"]) == len(ids)
    assert body["prompt_logprobs"][0] is None
    assert str(ids[1]) in body["prompt_logprobs"][1]
    assert is_error(client.post(PATH, json=chat(prompt_logprobs=1, stream=True)), 400, "prompt_logprobs")


def test_token_ids(client: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(RENDERED)
    body = client.post(PATH, json=chat(return_token_ids=True)).json()
    assert body["prompt_token_ids"] == ids
    assert body["choices"][0]["token_ids"] == ids[:6]
    stream = post_stream(client, PATH, chat(return_token_ids=True))
    assert stream.chunks[0]["prompt_token_ids"] == ids
    assert [token for choice in stream.choices() for token in choice.get("token_ids", [])] == ids[:6]


def test_content_parts_and_developer_role(client: httpx.Client, tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind."}]},
        {"role": "user", "content": [{"type": "text", "text": "Hi there"}], "name": "Ann"},
    ]
    body = client.post(PATH, json=chat(messages=messages)).json()
    expected = RENDERED.replace("Be kind.", "Be\nkind.")
    assert body["usage"]["prompt_tokens"] == len(tokenizer.encode(expected))


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("Hi", "messages"),
        ([5], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "king", "content": "x"}], "messages[0].role"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "tool", "content": "x", "tool_call_id": 1}], "messages[0].tool_call_id"),
        ([USER, {"role": "assistant", "tool_calls": []}], "messages[1].content"),
        ([USER, {"role": "assistant", "tool_calls": {"id": "1"}}], "messages[1].tool_calls"),
        ([USER, {"role": "assistant", "tool_calls": [5]}], "messages[1].tool_calls[0]"),
        ([USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages[1].tool_calls[0].function"),
        ([USER, {"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[1].tool_calls[0].function.name"),
        ([USER, {"role": "assistant", "tool_calls": [{"type": "custom"}]}], "messages[1].tool_calls[0].type"),
        (
            [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}],
            "messages[1].tool_calls[0].function.arguments",
        ),
        ([USER, {"role": "assistant", "function_call": {"arguments": "{}"}}], "messages[1].function_call"),
        ([USER, {"role": "function", "content": "x"}], "messages[1].name"),
        ([USER, {"role": "assistant", "content": "x", "reasoning": 5}], "messages[1].reasoning"),
        ([USER | {"tool_calls": [{"id": "1"}]}], "messages[0].tool_calls"),
    ],
)
def test_malformed_messages(client: httpx.Client, messages: Any, param: str) -> None:
    assert is_error(client.post(PATH, json=chat(messages=messages)), 400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"chat_template": "x"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
def test_refused_fields_of_chat(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    assert is_error(client.post(PATH, json=chat(**fields)), 400, param)
