from typing import Any

import httpx
import pytest
from openai.types import Completion

from tests.support.api_server import MODEL_NAME, Server
from tests.support.sse import is_error, post_stream, strict_json
from tokenmill_server.processing.tokenizer import Tokenizer

PATH = "/v1/completions"


def completion(prompt: Any = "one two three", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL_NAME, "prompt": prompt, "temperature": 0, "max_tokens": 4, **fields}


def text_of(client: httpx.Client, body: dict[str, Any]) -> str:
    return str(client.post(PATH, json=body).json()["choices"][0]["text"])


def test_answer(client: httpx.Client) -> None:
    response = client.post(PATH, json=completion())
    body = Completion.model_validate(strict_json(response.text))
    assert body.id == f"cmpl-{response.headers['x-request-id']}"
    assert body.choices[0].text == "one two threeone"
    assert body.choices[0].finish_reason == "length"
    assert body.usage is not None
    assert (body.usage.prompt_tokens, body.usage.completion_tokens, body.usage.total_tokens) == (3, 4, 7)


def test_sixteen_tokens_by_default(client: httpx.Client) -> None:
    for fields in ({}, {"max_tokens": None}):
        body = {"prompt": "one two three", "temperature": 0, **fields}
        assert client.post(PATH, json=body).json()["usage"]["completion_tokens"] == 16


def test_four_forms_of_prompts(client: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three")
    other = tokenizer.encode("four five")
    for prompt, texts in (
        (ids, ["one two threeone"]),
        (["one two three", "four five"], ["one two threeone", "four fivefour five"]),
        ([ids, other], ["one two threeone", "four fivefour five"]),
    ):
        body = client.post(PATH, json=completion(prompt)).json()
        assert [choice["text"] for choice in body["choices"]] == texts
        assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))
        assert body["usage"]["completion_tokens"] == 4 * len(texts)


def test_several_prompts_with_several_choices_stream(client: httpx.Client) -> None:
    body = completion(["one two three", "four five"], n=2, temperature=1, seed=3, max_tokens=7)
    whole = client.post(PATH, json=body).json()["choices"]
    stream = post_stream(client, PATH, body | {"stream_options": {"include_usage": True}})
    assert [stream.text(index) for index in range(4)] == [choice["text"] for choice in whole]
    assert stream.usage is not None
    assert (stream.usage["prompt_tokens"], stream.usage["completion_tokens"]) == (5, 28)


@pytest.mark.parametrize(
    "prompt",
    ["\n1. Carol has 20", "\n\n\na\n\n\nb", "日本語のテキスト", "a 🎉 and 🦄!", "<|im_start|>user\nhi<|im_end|>"],
)
def test_echoed_tokens_join_to_the_text(client: httpx.Client, prompt: str) -> None:
    """Token strings and offsets fit the text."""
    body = completion(prompt, echo=True, logprobs=1, max_tokens=5, ignore_eos=True, skip_special_tokens=False)
    choice = client.post(PATH, json=body).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith(prompt)
    assert "".join(logprobs["tokens"]) == choice["text"]
    offset = 0
    for token, its_offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert its_offset == offset
        offset += len(token)
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    stream = post_stream(client, PATH, body)
    assert stream.text() == choice["text"]
    for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        streamed = [entry for one in stream.choices() for entry in (one["logprobs"] or {}).get(name, [])]
        assert streamed == logprobs[name]


@pytest.mark.parametrize("stream", [False, True])
def test_scoring_a_prompt(client: httpx.Client, stream: bool) -> None:
    """What evaluation harnesses send."""
    prompt = "Your answer: Yes"
    body = completion(prompt, max_tokens=0, echo=True, logprobs=1)
    if stream:
        answer = post_stream(client, PATH, body | {"stream_options": {"include_usage": True}})
        choice, usage = answer.choices()[0], answer.usage
    else:
        response = strict_json(client.post(PATH, json=body).text)
        choice, usage = response["choices"][0], response["usage"]
    assert usage is not None
    logprobs = choice["logprobs"]
    assert choice["text"] == prompt
    assert choice["finish_reason"] == "length"
    assert len(logprobs["tokens"]) == usage["prompt_tokens"]
    assert usage["completion_tokens"] == 0
    assert logprobs["token_logprobs"][0] is None
    assert all(-10000 < value <= 0 for value in logprobs["token_logprobs"][1:])


def test_echo_without_generation_or_scores_needs_no_engine(client: httpx.Client, server: Server) -> None:
    before = len(server.engines[0].added)
    body = client.post(PATH, json=completion(["a b", "c"], max_tokens=0, echo=True, n=2)).json()
    assert [choice["text"] for choice in body["choices"]] == ["a b", "a b", "c", "c"]
    assert body["choices"][0]["logprobs"] is None
    assert len(server.engines[0].added) == before
    assert is_error(client.post(PATH, json=completion(max_tokens=0)), 400, "max_tokens")


def test_impossible_tokens_have_finite_logprobs(client: httpx.Client) -> None:
    """The echo engine says minus infinity for every id that is a multiple of 50."""
    body = completion([50, 100, 150, 7, 200], echo=True, logprobs=3, max_tokens=3)
    response = client.post(PATH, json=body)
    values = strict_json(response.text)["choices"][0]["logprobs"]["token_logprobs"]
    assert values[1:] == [-9999.0, -9999.0, -1.0, -9999.0, -9999.0, -9999.0, -9999.0]
    post_stream(client, PATH, body)


@pytest.mark.parametrize("with_logprobs", [False, True])
def test_a_prompt_that_ends_inside_a_character(client: httpx.Client, tokenizer: Tokenizer, with_logprobs: bool) -> None:
    """The output is the text of the generated tokens, no delta repeats the prompt."""
    prompt = [*tokenizer.encode("Hello world "), *tokenizer.encode("🦄")[:-1]]
    body = completion(prompt, max_tokens=2, return_token_ids=True, **({"logprobs": 0} if with_logprobs else {}))
    choice = client.post(PATH, json=body).json()["choices"][0]
    assert choice["text"] == tokenizer.decode(choice["token_ids"]) == "Hello world"
    assert post_stream(client, PATH, body).text() == "Hello world"


def test_output_may_finish_the_prompts_character(client: httpx.Client, tokenizer: Tokenizer, server: Server) -> None:
    emoji = tokenizer.encode("🦄")
    prompt = [emoji[-1], *tokenizer.encode(" x"), *emoji[:-1]]
    body = completion(prompt, max_tokens=2)
    assert text_of(client, body) == "🦄 x"
    assert post_stream(client, PATH, body).text() == "🦄 x"


@pytest.mark.parametrize("limit", range(1, 9))
@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}])
def test_a_limit_inside_a_character(
    client: httpx.Client, tokenizer: Tokenizer, limit: int, fields: dict[str, Any]
) -> None:
    """Whole characters only, the same in both modes."""
    prompt = tokenizer.encode("🦄é日🎉")
    body = completion(prompt, max_tokens=limit, **fields)
    whole = text_of(client, body)
    assert post_stream(client, PATH, body).text() == whole
    assert "\ufffd" not in whole
    assert "🦄é日🎉".startswith(whole) or whole.startswith("🦄é日🎉")


def test_a_stop_string_never_leaks(client: httpx.Client) -> None:
    body = completion("ABCDEFGHIJ", max_tokens=30)
    for stop, text, reason in (
        (["DEFGHIJ"], "ABC", "stop"),
        (["J", "DEFGHIJA"], "ABCDEFGHI", "stop"),
        ("HIJAB", "ABCDEFG", "stop"),
        (["DEFX"], text_of(client, body), "length"),
    ):
        whole = client.post(PATH, json=body | {"stop": stop}).json()["choices"][0]
        assert (whole["text"], whole["finish_reason"]) == (text, reason)
        assert whole["stop_reason"] == ((stop if isinstance(stop, str) else stop[0]) if reason == "stop" else None)
        stream = post_stream(client, PATH, body | {"stop": stop})
        assert (stream.text(), stream.finish_reason()) == (text, reason)
    shown = body | {"stop": ["DEF"], "include_stop_str_in_output": True}
    assert text_of(client, shown) == "ABCDEF"


def test_stop_token_ids_and_min_tokens(client: httpx.Client, tokenizer: Tokenizer) -> None:
    (two,) = tokenizer.encode(" two")
    choice = client.post(PATH, json=completion(max_tokens=20, stop_token_ids=[two])).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one", "stop", two)
    longer = completion(max_tokens=20, stop=[" two"], min_tokens=4)
    assert text_of(client, longer) == "one two threeone"


def test_token_ids_and_names(client: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three")
    body = completion(return_token_ids=True, return_tokens_as_token_ids=True, logprobs=0)
    choice = client.post(PATH, json=body).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (ids, [*ids, ids[0]])
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    stream = post_stream(client, PATH, body)
    assert stream.choices()[0]["prompt_token_ids"] == ids
    assert [token for one in stream.choices() for token in one.get("token_ids", [])] == choice["token_ids"]


def test_prompt_logprobs(client: httpx.Client) -> None:
    choice = client.post(PATH, json=completion(prompt_logprobs=2)).json()["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [3, 3]
    entry = next(iter(choice["prompt_logprobs"][1].values()))
    assert set(entry) == {"logprob", "rank", "decoded_token"}


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        (None, {}),
        ("", {}),
        ([""], {}),
        ([], {}),
        ([[]], {}),
        (7, {}),
        ({"a": 1}, {}),
        ([1, "a"], {}),
        ([[1], "a"], {}),
        ([1.5], {}),
        ([True], {}),
        ([-1], {}),
        ([49152], {}),
        ([[1, 10**12]], {}),
        (["x"] * 1025, {}),
        ("word " * 9000, {}),
    ],
)
def test_malformed_prompts(client: httpx.Client, prompt: Any, fields: dict[str, Any]) -> None:
    """An empty prompt is refused, nothing dies."""
    assert is_error(client.post(PATH, json=completion(prompt, **fields)), 400, "prompt")
    assert text_of(client, completion()) == "one two threeone"


def test_a_prompt_that_is_too_long_says_so(client: httpx.Client) -> None:
    assert is_error(client.post(PATH, json=completion([504] * 8192)), 400, "prompt", "context_length_exceeded")
    body = client.post(PATH, json=completion([504] * 8190, max_tokens=50)).json()
    assert body["usage"]["completion_tokens"] == 2


def test_too_many_choices_in_all(client: httpx.Client) -> None:
    assert is_error(client.post(PATH, json=completion(["a"] * 1000, n=17)), 400, "n")
