"""Every sampling field reaches the engine or is refused by name; nothing is dropped in silence."""

import dataclasses
import json
from typing import Any

import httpx
import pytest

from tests.support.api_server import MODEL_NAME, Server, engine_config, run_server
from tests.support.sse import is_error, post_stream
from tokenmill_engine.config.engine import SchedulerConfig
from tokenmill_server.protocol.chat import MAX_PARTS
from tokenmill_server.protocol.fields import INSTEAD
from tokenmill_server.protocol.partners import PARTNERS

NESTED = json.loads('{"not": ' * 65 + "{}" + "}" * 65)
"""One level too deep."""
PATH = "/v1/completions"
CHAT = "/v1/chat/completions"


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL_NAME, "prompt": "one two three", "max_tokens": 2, **fields}


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"temperature": 0.5}, "temperature", 0.5),
        ({"temperature": 0}, "temperature", 0.0),
        ({"top_p": 0.5}, "top_p", 0.5),
        ({"top_k": 5}, "top_k", 5),
        ({"min_p": 0.1}, "min_p", 0.1),
        ({"presence_penalty": 1}, "presence_penalty", 1.0),
        ({"frequency_penalty": -1.5}, "frequency_penalty", -1.5),
        ({"repetition_penalty": 1.2}, "repetition_penalty", 1.2),
        ({"seed": 42}, "seed", 42),
        ({"seed": -1}, "seed", None),
        ({"max_tokens": 3.0}, "max_tokens", 3),
        ({"min_tokens": 2}, "min_tokens", 2),
        ({"stop_token_ids": [7]}, "stop_token_ids", (7,)),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"logit_bias": {"7": 5, "8": -500}}, "logit_bias", {7: 5.0, 8: -100.0}),
        ({"allowed_token_ids": [1, 2]}, "allowed_token_ids", (1, 2)),
        ({"bad_words": [" one"]}, "bad_words_token_ids", None),
        ({"logprobs": 3}, "logprobs", 3),
        ({"logprobs": 1, "logprob_token_ids": [9, 5, 9]}, "logprob_token_ids", (9, 5)),
    ],
)
def test_reaches_the_engine(
    client: httpx.Client, server: Server, fields: dict[str, Any], name: str, value: Any
) -> None:
    assert client.post(PATH, json=completion(**fields)).status_code == 200
    sent = getattr(server.engines[0].added[-1].sampling, name)
    assert sent == value if name != "bad_words_token_ids" else len(sent) == 2


def test_salt_and_label_reach_the_engine(client: httpx.Client, server: Server) -> None:
    client.post(PATH, json=completion(cache_salt="tenant 1", request_id="mine"))
    assert server.engines[0].added[-1].cache_salt == "tenant 1"
    assert server.engines[0].added[-1].label == "mine"


def test_truncation_and_special_tokens(client: httpx.Client) -> None:
    body = client.post(PATH, json=completion(truncate_prompt_tokens=2, echo=True, max_tokens=1)).json()
    assert body["usage"]["prompt_tokens"] == 2
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "add_special_tokens": True}
    assert client.post(CHAT, json=chat).status_code == 200


def test_special_tokens_are_hidden_unless_asked_for(client: httpx.Client) -> None:
    body = completion(prompt=[1, 504], max_tokens=2, temperature=0)
    assert client.post(PATH, json=body).json()["choices"][0]["text"] == "The"
    shown = client.post(PATH, json=body | {"skip_special_tokens": False}).json()
    assert shown["choices"][0]["text"] == "<|im_start|>The"


@pytest.mark.parametrize("path", [PATH, CHAT])
@pytest.mark.parametrize(
    ("param", "value"),
    [
        *[("temperature", value) for value in ("hot", -1, 2.5, True, [1])],
        *[("top_p", value) for value in (0, 1.5, "1")],
        *[("top_k", value) for value in (-2, 1.5, "5")],
        *[("min_p", value) for value in (-1, 2)],
        *[("presence_penalty", value) for value in (-3, "x")],
        *[("frequency_penalty", value) for value in (3,)],
        *[("repetition_penalty", value) for value in (0, -1)],
        *[("n", value) for value in (0, -1, 1025, 10**5, 1.5, "2", 10**30)],
        *[("seed", value) for value in (2**63, 1.5, "x")],
        *[("max_tokens", value) for value in (-1, 8193, "5", 1.5)],
        *[("min_tokens", value) for value in (-1, 3)],
        *[("stop", value) for value in ("", [""], ["a"] * 5, 7, [7], ["x" * 1025])],
        *[("stop_token_ids", value) for value in ([-1], [49152], ["a"], 7)],
        *[("logit_bias", value) for value in ([1], "x", {"5": "x"})],
        *[
            ("logit_bias", {key: 5})
            for key in ("99999999", "-1", "abc", "49152", "1.5", "", "-0", "01", "+1", "1\n", "\u0661")
        ],
        *[("repetition_penalty", value) for value in (1e-300, 1e300)],
        *[("allowed_token_ids", value) for value in ([], [49152])],
        *[("bad_words", value) for value in ([""], "x", ["x"] * 129, ["x" * 200_000])],
        ("spaces_between_special_tokens", False),
        *[("logprob_token_ids", value) for value in ([1], [49152], [*range(129)], "x")],
        *[("prompt_logprobs", value) for value in (-1, 21, "x")],
        *[("stream", value) for value in ("yes", 1)],
        *[("stream_interval", value) for value in (0, -1, "x")],
        *[("stream_options", value) for value in ({"include_usage": True}, {}, 5)],
        *[("cache_salt", value) for value in ("", "a@b", "a/b", "x" * 129, 7)],
        *[("request_id", value) for value in ("", "a\nb", "é", "x" * 257)],
        *[("truncate_prompt_tokens", value) for value in (-2, 8193)],
        *[("truncation_side", value) for value in ("top",)],
        *[("priority", value) for value in (1, "x", 2**63)],
        *[("echo", value) for value in ("yes",)],
        *[
            ("repetition_detection", {"max_pattern_size": 4} | value)
            for value in ({"max_pattern_size": 257}, {"min_pattern_size": 5}, {"min_count": 1}, {"min_cuont": 3})
        ],
        *[("repetition_detection", value) for value in (3, {"max_pattern_size": -1})],
        *[("response_format", value) for value in ("text", {}, {"type": "xml"}, {"type": "json_schema"})],
        *[("response_format", {"type": "json_schema", "json_schema": value}) for value in (5, {}, {"schema": 5})],
        *[("structured_outputs", value) for value in ("a", {}, {"regex": "a", "choice": ["a"]}, {"rex": "a"})],
        *[("structured_outputs", {"choice": value}) for value in ([], [""], [5], "a", ["a"] * 10_001)],
        *[("structured_outputs", {"json": value}) for value in ("{", 5, "5", NESTED)],
        *[("structured_outputs", value) for value in ({"json_object": False}, {"regex": ""}, {"regex": "a" * 262_145})],
        ("structured_outputs", {"regex": "a", "whitespace_pattern": " "}),
        ("structured_outputs", {"json": {}, "disable_any_whitespace": 5}),
    ],
)
def test_refused_by_name(client: httpx.Client, path: str, param: str, value: Any) -> None:
    """Wrong types and ranges are 400, and the answer says which field."""
    body = completion() if path == PATH else {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    response = client.post(path, json=body | {param: value})
    assert is_error(response, 400)
    assert response.json()["error"]["param"].split(".")[0].split("[")[0] == param


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
def test_numbers_that_are_none(client: httpx.Client, field: str, literal: str) -> None:
    for text in (f'"{field}": {literal}', f'"logit_bias": {{"5": {literal}}}'):
        body = f'{{"prompt": "x", "max_tokens": 1, {text}}}'
        response = client.post(PATH, content=body, headers={"content-type": "application/json"})
        assert is_error(response, 400)


@pytest.mark.parametrize("path", [PATH, CHAT])
@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("guided_json", {}),
        ("guided_regex", "a"),
        ("guided_choice", ["a"]),
        ("guided_grammar", "x"),
        ("best_of", 3),
        ("suffix", "x"),
        ("prompt_embeds", "x"),
        ("kv_transfer_params", {"a": 1}),
        ("modalities", ["text", "audio"]),
        ("thinking_token_budget", 5),
        ("mm_processor_kwargs", {"a": 1}),
    ],
)
def test_what_is_not_there_is_refused(client: httpx.Client, path: str, param: str, value: Any) -> None:
    body = completion() if path == PATH else {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    assert is_error(client.post(path, json=body | {param: value}), 400, param, "unsupported_parameter")


def test_values_that_ask_for_nothing_are_fine(client: httpx.Client) -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 2,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "suffix": None,
        "best_of": 1,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "modalities": ["text"],
        "parallel_tool_calls": False,
        "guided_json": None,
    }
    response = client.post(CHAT, json=body)
    assert response.status_code == 200
    assert "x-ignored-fields" not in response.headers


@pytest.mark.parametrize("path", [PATH, CHAT])
@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"tools": [], "tool_choice": "none"}, None),
        ({"tools": None}, None),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}, "tools"),
    ],
)
def test_tools_that_will_not_be_called(
    client: httpx.Client, path: str, fields: dict[str, Any], ignored: str | None
) -> None:
    """Agent frameworks send them always."""
    body = completion() if path == PATH else {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    response = client.post(path, json=body | fields)
    assert response.status_code == 200
    assert response.headers.get("x-ignored-fields") == ignored


@pytest.mark.parametrize("kind", ["image_url", "video_url", "input_audio", "audio_url", "file", "thinking"])
def test_parts_that_are_no_text(client: httpx.Client, kind: str) -> None:
    parts = [{"type": "text", "text": "x"}, {"type": kind, kind: {"url": "data:"}}]
    response = client.post(CHAT, json={"messages": [{"role": "user", "content": parts}]})
    assert is_error(response, 400, "messages[0].content[1].type", "unsupported_parameter")


def test_refusals_of_the_assistant_are_text(client: httpx.Client) -> None:
    """As OpenAI's messages have them."""
    for part in ({"type": "refusal", "refusal": "No."}, {"type": "output_text", "text": "No."}):
        messages = [{"role": "assistant", "content": [part]}, {"role": "user", "content": "x"}]
        body = {"messages": messages, "max_tokens": 1, "return_prompt_text": True}
        assert "assistant\nNo.<" in client.post(CHAT, json=body).json()["prompt_text"]
    broken = [{"role": "assistant", "content": [{"type": "refusal", "text": "No."}]}]
    assert is_error(client.post(CHAT, json={"messages": broken}), 400, "messages[0].content[0].refusal")


@pytest.mark.parametrize("path", [PATH, CHAT])
@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"truncation_side": "right"}, "truncation_side"),
        ({"truncation_side": "right", "truncate_prompt_tokens": 2}, None),
        ({"stream_interval": 3}, "stream_interval"),
        ({"stream_interval": 3, "stream": True}, None),
        ({"stream_interval": 1}, None),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": True, "use_beam_search": False}, "early_stopping"),
        ({"early_stopping": True, "length_penalty": 2.0, "use_beam_search": True}, None),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
        ({"return_tokens_as_token_ids": True, "prompt_logprobs": 0}, None),
    ],
)
def test_fields_without_their_partner(
    client: httpx.Client, path: str, fields: dict[str, Any], ignored: str | None
) -> None:
    """They say how to do what the request does not ask for."""
    body = completion() if path == PATH else {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    response = client.post(path, json=body | fields)
    assert response.status_code == 200
    assert response.headers.get("x-ignored-fields") == ignored


@pytest.mark.parametrize("name", PARTNERS)
def test_every_field_with_a_partner_is_listed_alone(client: httpx.Client, name: str) -> None:
    value = {"truncation_side": "left", "length_penalty": 0.5, "stream_interval": 2}.get(name, True)
    assert client.post(PATH, json=completion(**{name: value})).headers["x-ignored-fields"] == name


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"echo": True}, "echo"),
        ({"max_completion_tokens": 1}, "max_tokens"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"documents": []}, None),
    ],
)
def test_fields_that_this_chat_does_not_use(client: httpx.Client, fields: dict[str, Any], ignored: str | None) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    response = client.post(CHAT, json=body | {"max_tokens": 2})
    assert response.status_code == 200
    assert response.headers.get("x-ignored-fields") == ignored
    if "chat_template_kwargs" in fields or "documents" in fields:
        assert client.post("/tokenize", json=body).headers.get("x-ignored-fields") == ignored


def test_the_limit_is_named_as_the_client_named_it(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    for name in ("max_tokens", "max_completion_tokens"):
        assert is_error(client.post(CHAT, json=body | {name: 8193}), 400, name)


@pytest.mark.parametrize(("name", "advice"), INSTEAD.items())
def test_what_is_not_there_names_what_is(client: httpx.Client, name: str, advice: str) -> None:
    response = client.post(PATH, json=completion(**{name: 7}))
    assert is_error(response, 400, name, "unsupported_parameter")
    assert response.json()["error"]["message"].endswith(advice)


def test_parts_that_are_nothing(client: httpx.Client) -> None:
    for part in (5, {}, {"type": 7}):
        response = client.post(CHAT, json={"messages": [{"role": "user", "content": [part]}]})
        assert is_error(response, 400, "messages[0].content[0].type", "invalid_value")


@pytest.mark.parametrize("stream", [False, True])
def test_the_reply_names_keys_of_parts_without_effect(client: httpx.Client, stream: bool) -> None:
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}, "annotations": None}
    body = {"messages": [{"role": "user", "content": [part, "y"]}], "max_tokens": 2, "user": "me"}
    response = post_stream(client, CHAT, body) if stream else client.post(CHAT, json=body)
    assert response.headers["x-ignored-fields"] == "user, messages[0].content[0].cache_control"


def test_tokenize_is_as_strict_as_chat(client: httpx.Client) -> None:
    """What would change the prompt and is not there does not change the count in silence."""
    part = {"type": "text", "text": "x", "txet": "y"}
    body = {"messages": [{"role": "user", "content": [part]}], "wibble": 1, "tools": None}
    response = client.post("/tokenize", json=body)
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "wibble, messages[0].content[0].txet"
    assert "x-ignored-fields" not in client.post("/tokenize", json={"prompt": "x"}).headers
    response = client.post("/detokenize", json={"tokens": [1], "wibble": 1})
    assert response.headers["x-ignored-fields"] == "wibble"
    for name, value in (("tools", [{"function": {"name": "f"}}]), ("chat_template", "x")):
        response = client.post("/tokenize", json=body | {name: value})
        assert is_error(response, 400, name, "unsupported_parameter")


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_more_content_parts_than_a_request_may_have(client: httpx.Client, path: str) -> None:
    """Those of all messages count, and a message of text as one."""
    text = {"role": "user", "content": "x"}
    content = [{"type": "text", "text": ""}] * (MAX_PARTS - 1)
    for messages, param in (
        ([text, {"role": "user", "content": [*content, *content[:1]]}], "messages[1].content"),
        ([{"role": "user", "content": content}, text, text], "messages[2]"),
        ([{"role": "user", "content": []}] * (MAX_PARTS + 1), f"messages[{MAX_PARTS}].content"),
    ):
        response = client.post(path, json={"messages": messages})
        assert is_error(response, 400, param, "invalid_value"), response.text
        assert f"more than {MAX_PARTS} content parts" in response.json()["error"]["message"]
    response = client.post("/tokenize", json={"messages": [{"role": "user", "content": content[:-1]}, text]})
    assert response.status_code == 200, response.text


def test_too_many_choices_are_told_in_numbers(client: httpx.Client) -> None:
    one = client.post(PATH, json=completion(n=100_000)).json()["error"]["message"]
    assert one == "n must be at most 1024, got 100000"
    two = client.post(PATH, json=completion(prompt=["a", "b"], n=600)).json()["error"]["message"]
    assert two == "2 prompts with n 600 make more than 1024 choices"


@pytest.mark.parametrize("stream", [False, True])
def test_the_reply_names_fields_without_effect(client: httpx.Client, stream: bool) -> None:
    """What OpenAI's clients may send, and what nobody knows, is accepted but not in silence."""
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 2,
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "verbosity": "low",
        "prediction": {},
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "web_search_options": {},
        "functions": [],
        "function_call": "none",
        "wibble": 1,
        **({"stream_options": {"include_usage": True, "include_obfuscation": False}} if stream else {}),
    }
    response = post_stream(client, CHAT, body) if stream else client.post(CHAT, json=body)
    names = "metadata, prediction, prompt_cache_key, safety_identifier, service_tier, store"
    options = ", stream_options.include_obfuscation" if stream else ""
    assert response.headers["x-ignored-fields"] == f"{names}{options}, user, verbosity, web_search_options, wibble"


def test_defaults_of_the_model_and_of_the_server() -> None:
    defaults = {"temperature": 0.3, "top_k": 11, "max_tokens": 5, "repetition_penalty": 1.1}
    with run_server(default_sampling=defaults, stream_interval=3) as server, server.client() as client:
        chat = {"messages": [{"role": "user", "content": "x y z"}], "ignore_eos": True}
        client.post(CHAT, json=chat)
        sent = server.engines[0].added[-1].sampling
        assert (sent.temperature, sent.top_k, sent.max_tokens, sent.repetition_penalty) == (0.3, 11, 5, 1.1)
        client.post(CHAT, json=chat | {"temperature": 0, "top_k": 0, "max_tokens": 2})
        sent = server.engines[0].added[-1].sampling
        assert (sent.temperature, sent.top_k, sent.max_tokens) == (0.0, 0, 2)
        body = chat | {"max_tokens": 10, "return_token_ids": True, "stream_interval": 2}
        sizes = [len(choice.get("token_ids", [])) for choice in post_stream(client, CHAT, body).choices()]
        assert sizes == [0, 1, 3, 3, 3]


@pytest.mark.slow
def test_a_default_limit_beyond_the_context_is_no_error_of_the_client() -> None:
    with run_server(default_sampling={"max_tokens": 10**6}) as server, server.client() as client:
        chat = {"messages": [{"role": "user", "content": "x"}]}
        assert client.post(CHAT, json=chat).status_code == 200
        assert is_error(client.post(CHAT, json=chat | {"max_tokens": 10**6}), 400, "max_tokens")


@pytest.mark.slow
def test_a_model_with_a_context_shorter_than_the_default_limit() -> None:
    with run_server(engine=engine_config(max_model_len=12)) as server, server.client() as client:
        assert client.post(PATH, json={"prompt": "x"}).status_code == 200
        assert is_error(client.post(PATH, json={"prompt": "x", "max_tokens": 16}), 400, "max_tokens")


@pytest.mark.slow
def test_priority_under_its_policy() -> None:
    config = dataclasses.replace(engine_config(), scheduler=SchedulerConfig(policy="priority"))
    with run_server(engine=config) as server, server.client() as client:
        client.post(PATH, json=completion(priority=-5))
        assert server.engines[0].added[-1].priority == -5
        client.post(PATH, json=completion(priority=-5), headers={"X-Vllm-Priority": "8"})
        assert server.engines[0].added[-1].priority == 8
        for wrong in ("x", str(2**63), str(-(2**63) - 1), "1" * 5000, "1_0", ""):
            assert is_error(client.post(PATH, json=completion(), headers={"X-Vllm-Priority": wrong}), 400)
            assert is_error(client.post(PATH, json=completion(), headers={"X-data-parallel-rank": wrong}), 400)
        for wrong in (2**63, -(2**63) - 1):
            assert is_error(client.post(PATH, json=completion(priority=wrong)), 400, "priority")


@pytest.mark.parametrize("name", ["X-data-parallel-rank", "X-Vllm-Priority"])
def test_a_header_that_is_there_twice(client: httpx.Client, name: str) -> None:
    """In whatever case; saying the same twice is no contradiction."""
    for values in (("0", "1"), ("1", "0"), ("0", "0", "1"), ("0", "x"), ("0", ""), ("0, 1",)):
        headers = [(name if index % 2 else name.lower(), value) for index, value in enumerate(values)]
        response = client.post(PATH, json=completion(), headers=headers)
        assert is_error(response, 400, name)
        assert name in response.json()["error"]["message"]
    assert client.post(PATH, json=completion(), headers=[(name, "0"), (name, "+00")]).status_code == 200


@pytest.mark.parametrize("name", ["self", "messages", "range", "raise_exception"])
def test_names_that_no_template_variable_may_have(client: httpx.Client, name: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "chat_template_kwargs": {name: 1}}
    assert is_error(client.post(CHAT, json=body), 400, "chat_template_kwargs")


def test_nothing_to_choose_from(client: httpx.Client) -> None:
    fields = {"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 1}
    assert is_error(client.post(PATH, json=completion(**fields)), 400, "allowed_token_ids")


def test_prompt_logprobs_of_many_prompts(client: httpx.Client) -> None:
    prompts = [[1] * 1000] * 150
    assert is_error(client.post(PATH, json=completion(prompt=prompts, prompt_logprobs=20)), 400, "prompt_logprobs")
    echoed = completion(prompt=prompts, logprobs=20, echo=True)
    assert is_error(client.post(PATH, json=echoed), 400, "logprobs")
    streamed = completion(prompt=prompts[:3], logprobs=20, echo=True, stream=True)
    assert is_error(client.post(PATH, json=streamed), 400, "logprobs")
    assert client.post(PATH, json=streamed | {"stream": False}).status_code == 200
