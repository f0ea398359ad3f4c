"""Calls of tools and thinking over HTTP. The template makes the last message the whole prompt, and the engine repeats
it: the test writes the model's output."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from tests.support.api_server import MODEL_NAME, Server, engine_config, run_server
from tests.support.sse import is_error, post_stream
from tests.support.tiny_models import add_special_tokens, write_tokenizer
from tests.support.tool_outputs import TOOLS
from tokenmill_engine.messages import StructuredSpec
from tokenmill_server.processing.tokenizer import load_tokenizer

PATH = "/v1/chat/completions"
TEMPLATE = "{{ messages[-1].content }}<|im_end|>{{ tools | tojson if tools }}"
FUNCTIONS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}
    for name, schema in TOOLS.items()
]
THOUGHT = "<think>\nThe user wants weather.\n</think>\n\n"
CALLS = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
FUNCTION = {"type": "function", "function": {"name": "f"}}


DEEP: dict[str, Any] = {}
for _ in range(300):
    DEEP = {"properties": {"a": DEEP}}


@pytest.fixture(scope="module", params=[1, 5])
def tool_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """`param` tokens per step."""
    with run_server(
        engine_options={"tokens_per_step": request.param},
        chat_template=TEMPLATE,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
    ) as server:
        yield server


@pytest.fixture(scope="module")
def http(tool_server: Server) -> Iterator[httpx.Client]:
    with tool_server.client() as client:
        yield client


@pytest.fixture(scope="module")
def client(tool_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def fields(output: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": output}]
    return {"model": MODEL_NAME, "messages": messages, "temperature": 0, "tools": FUNCTIONS, **more}


def test_calls_and_thinking_with_the_client(client: openai.OpenAI) -> None:
    """Whole, and streamed, accumulated by the client's own helper."""
    asked = fields(f"{THOUGHT}I look.\n{CALLS}")
    whole = client.chat.completions.create(**asked)
    message = whole.choices[0].message
    assert whole.choices[0].finish_reason == "tool_calls"
    assert message.content == "I look."
    assert message.model_extra is not None
    assert message.model_extra["reasoning"] == message.model_extra["reasoning_content"] == "The user wants weather."
    assert message.tool_calls is not None
    called = [(call.type, call.function.name, call.function.arguments) for call in message.tool_calls]
    assert called == [("function", "get_weather", '{"city": "Zürich"}'), ("function", "now", "{}")]
    assert len({call.id for call in message.tool_calls}) == 2
    assert all(call.id.startswith("chatcmpl-tool-") for call in message.tool_calls)
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    assert 5 < (whole.usage.completion_tokens_details.reasoning_tokens or 0) < whole.usage.completion_tokens

    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done", "content.done"} <= kinds
    joined = final.choices[0].message
    assert (joined.content, final.choices[0].finish_reason) == ("I look.", "tool_calls")
    assert [(call.type, call.function.name, call.function.arguments) for call in joined.tool_calls or []] == called
    assert final.usage == whole.usage


def test_deltas(http: httpx.Client) -> None:
    """The first of a call has its id, type and name; the text of each kind joined is that of the whole answer."""
    asked = fields(f"{THOUGHT}I look.\n{CALLS}")
    whole = http.post(PATH, json=asked).json()["choices"][0]["message"]
    stream = post_stream(http, PATH, asked)
    for chunk in stream.chunks:
        ChatCompletionChunk.model_validate(chunk)
    deltas = [choice["delta"] for choice in stream.choices()]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("reasoning", "") for delta in deltas) == whole["reasoning"]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == whole["reasoning_content"]
    assert stream.text() == whole["content"]
    assert stream.finish_reason() == "tool_calls"
    parts = [part for delta in deltas for part in delta.get("tool_calls", [])]
    for index in (0, 1):
        first, *rest = [part for part in parts if part["index"] == index]
        assert set(first) == {"index", "id", "type", "function"}
        assert set(first["function"]) == {"name", "arguments"}
        assert all(set(part) == {"index", "function"} and set(part["function"]) == {"arguments"} for part in rest)
        arguments = "".join(part["function"]["arguments"] for part in [first, *rest])
        assert arguments == whole["tool_calls"][index]["function"]["arguments"]


def test_answers_without_calls(http: httpx.Client) -> None:
    choice = http.post(PATH, json=fields("No tools for me.\n")).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {
        "role": "assistant",
        "content": "No tools for me.\n",
        "refusal": None,
        "reasoning": None,
        "reasoning_content": None,
    }
    assert post_stream(http, PATH, fields("No tools for me.\n")).text() == "No tools for me.\n"
    plain = http.post(PATH, json=fields("Hi", tools=None)).json()["choices"][0]
    assert plain["message"]["content"] == "Hi"


def test_content_is_null_beside_calls(http: httpx.Client) -> None:
    message = http.post(PATH, json=fields(CALLS)).json()["choices"][0]["message"]
    assert message["content"] is None
    assert len(message["tool_calls"]) == 2


def test_thinking_and_nothing_else(http: httpx.Client) -> None:
    asked = fields(f"{THOUGHT}Sunny.", tools=None, max_tokens=5)
    message = http.post(PATH, json=asked).json()["choices"][0]["message"]
    assert message["content"] is None
    assert "The user wants weather.".startswith(message["reasoning"])
    empty = http.post(PATH, json=fields("", tools=None)).json()["choices"][0]["message"]
    assert (empty["content"], empty["reasoning"]) == ("", None)


def test_tokens_of_tools_are_counted(http: httpx.Client) -> None:
    """As in a chat, and tools are refused alike."""
    asked = fields("Hi", max_tokens=1)
    counted = http.post("/tokenize", json={"messages": asked["messages"], "tools": FUNCTIONS}).json()["count"]
    assert counted == http.post(PATH, json=asked).json()["usage"]["prompt_tokens"]
    assert counted > http.post(PATH, json=fields("Hi", tools=None, max_tokens=1)).json()["usage"]["prompt_tokens"]
    assert is_error(http.post("/tokenize", json={"messages": asked["messages"], "tools": []}), 400, "tools")


def test_one_call_at_a_time(http: httpx.Client) -> None:
    asked = fields(CALLS, parallel_tool_calls=False)
    (call,) = http.post(PATH, json=asked).json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    parts = [part for c in post_stream(http, PATH, asked).choices() for part in c["delta"].get("tool_calls", [])]
    assert {part["index"] for part in parts} == {0}


def test_a_call_that_is_cut_short(http: httpx.Client) -> None:
    asked = fields(CALLS, max_tokens=18)
    choice = http.post(PATH, json=asked).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert '{"city": "Zürich"}'.startswith(call["function"]["arguments"])
    stream = post_stream(http, PATH, asked)
    parts = [part for c in stream.choices() for part in c["delta"].get("tool_calls", [])]
    assert "".join(part["function"]["arguments"] for part in parts) == call["function"]["arguments"]
    assert stream.finish_reason() == "length"


@pytest.mark.parametrize("stop", ["wants", "</think>", "user wants weather.\n</think>\n\nI", "look", "Zürich"])
def test_stop_strings(http: httpx.Client, stop: str) -> None:
    """Wherever one is: in the thinking, over its end, in the answer, in a call."""
    text = f"{THOUGHT}I look.\n{CALLS}"
    asked = fields(text, stop=[stop])
    choice = http.post(PATH, json=asked).json()["choices"][0]
    kept = text[: text.index(stop)]
    thinking, _, answer = kept.removeprefix("<think>\n").partition("\n</think>\n\n")
    assert (choice["message"]["reasoning"] or "") == thinking.rstrip("\n")
    assert (choice["message"]["content"] or "").rstrip() == answer.partition("<tool_call>")[0].rstrip()
    assert choice["stop_reason"] == stop
    stream = post_stream(http, PATH, asked)
    streamed = "".join(each["delta"].get("reasoning", "") for each in stream.choices())
    assert (streamed, stream.text()) == (choice["message"]["reasoning"] or "", choice["message"]["content"] or "")
    assert stream.finish_reason() == choice["finish_reason"] == ("tool_calls" if "get_weather" in kept else "stop")


def test_hidden_thinking(http: httpx.Client) -> None:
    """With its log-probabilities and token ids."""
    asked = fields(f"{THOUGHT}Sunny.", logprobs=True, return_token_ids=True, tools=None)
    shown = http.post(PATH, json=asked).json()
    hidden = http.post(PATH, json=asked | {"include_reasoning": False}).json()
    num_hidden = shown["usage"]["completion_tokens_details"]["reasoning_tokens"]
    choice, all_of_it = hidden["choices"][0], shown["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Sunny.", "refusal": None}
    assert choice["token_ids"] == all_of_it["token_ids"][num_hidden:]
    assert choice["logprobs"]["content"] == all_of_it["logprobs"]["content"][num_hidden:]
    assert hidden["usage"] == shown["usage"]
    stream = post_stream(http, PATH, asked | {"include_reasoning": False, "stream_options": {"include_usage": True}})
    assert stream.text() == "Sunny."
    assert "reasoning" not in json.dumps([each["delta"] for each in stream.choices()])
    assert [token for each in stream.choices() for token in each.get("token_ids", [])] == choice["token_ids"]
    assert stream.usage == hidden["usage"]


def test_intervals_and_choices(http: httpx.Client) -> None:
    asked = fields(f"{THOUGHT}I look.\n{CALLS}", n=2, seed=1, stream_interval=7, logprobs=True)
    whole = http.post(PATH, json=asked).json()["choices"]
    stream = post_stream(http, PATH, asked)
    for choice in whole:
        index = choice["index"]
        assert stream.text(index) == (choice["message"]["content"] or "")
        assert stream.finish_reason(index) == choice["finish_reason"]
        entries = [entry for each in stream.choices(index) for entry in (each.get("logprobs") or {}).get("content", [])]
        assert entries == choice["logprobs"]["content"]


def test_tools_that_must_not_be_called(http: httpx.Client) -> None:
    asked = fields(CALLS, tool_choice="none")
    response = http.post(PATH, json=asked)
    assert response.json()["choices"][0]["message"]["content"] == CALLS
    assert response.json()["choices"][0]["finish_reason"] == "stop"
    assert "x-ignored-fields" not in response.headers


def asked_of_engine(server: Server) -> StructuredSpec | None:
    return server.engines[0].added[-1].sampling.structured


def test_calls_that_the_client_wants_in_any_case(http: httpx.Client, tool_server: Server) -> None:
    """The grammar is the engine's affair, which this one has not got: the test writes what it would force."""
    forced = '[{"name": "get_weather", "arguments": {"city": "Zürich"}}, {"name": "now", "arguments": {}}]'
    asked = fields(forced, tool_choice="required")
    choice = http.post(PATH, json=asked).json()["choices"][0]
    spec = asked_of_engine(tool_server)
    assert spec is not None
    assert (spec.kind, spec.any_whitespace, spec.param) == ("structural_tag", True, "tools"), "after thinking"
    assert '"minItems": 1' in spec.text
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == ""
    called = [(call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"]]
    assert called == [("get_weather", '{"city": "Zürich"}'), ("now", "{}")]
    stream = post_stream(http, PATH, asked)
    assert (stream.text(), stream.finish_reason()) == ("", "tool_calls")

    named = {"type": "function", "function": {"name": "get_weather"}}
    asked = fields(THOUGHT + '{"city": "Zürich"}', tool_choice=named)
    choice = http.post(PATH, json=asked).json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "")
    assert choice["message"]["reasoning"] == "The user wants weather."
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Zürich"}'}
    assert post_stream(http, PATH, asked).finish_reason() == "stop"


def test_grammars_beside_calls(http: httpx.Client, tool_server: Server) -> None:
    wanted = {"type": "json_object"}
    response = http.post(PATH, json=fields("Hi", response_format=wanted, tool_choice="required"))
    assert response.headers["x-ignored-fields"] == "response_format"
    clash = fields("Hi", structured_outputs={"regex": "a"}, tool_choice="required")
    assert is_error(http.post(PATH, json=clash), 400, "structured_outputs")
    response = http.post(PATH, json=fields("Hi", response_format=wanted))
    assert "x-ignored-fields" not in response.headers
    spec = asked_of_engine(tool_server)
    assert spec is not None
    assert "get_weather" in spec.text
    assert spec.param == "response_format"
    http.post(PATH, json=fields("Hi", tool_choice="none", response_format=wanted))
    spec = asked_of_engine(tool_server)
    assert spec is not None
    assert "get_weather" not in spec.text
    http.post(PATH, json=fields("Hi"))
    assert asked_of_engine(tool_server) is None


def test_thinking_of_limited_length(http: httpx.Client, tool_server: Server) -> None:
    http.post(PATH, json=fields("Hi", thinking_token_budget=7))
    spec = asked_of_engine(tool_server)
    assert spec is not None
    assert '"max_tokens": 7' in spec.text
    assert spec.param == "thinking_token_budget"
    http.post(PATH, json=fields("Hi", thinking_token_budget=-1))
    assert asked_of_engine(tool_server) is None


def test_strict_tools(http: httpx.Client, tool_server: Server) -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True}}
    response = http.post(PATH, json=fields("Hi", tools=[FUNCTION, tool]))
    assert "x-ignored-fields" not in response.headers
    spec = asked_of_engine(tool_server)
    assert spec is not None
    assert "triggered_tags" in spec.text


@pytest.mark.slow
def test_formats_that_no_grammar_tells_from_text() -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True}}
    with run_server(chat_template=TEMPLATE, tool_call_parser="pythonic") as server, server.client() as http:
        response = http.post(PATH, json=fields("Hi", tools=[FUNCTION, tool]))
        assert response.headers["x-ignored-fields"] == "tools[1].function.strict"
        response = http.post(PATH, json=fields("Hi", response_format={"type": "json_object"}, include_reasoning=False))
        assert response.headers["x-ignored-fields"] == "include_reasoning, tool_choice"
        spec = asked_of_engine(server)
        assert spec is not None
        assert spec.kind == "json_object"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": [], "tool_choice": "auto"}, "tools"),
        ({"tools": None, "tool_choice": "auto"}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tools": None, "tool_choice": FUNCTION}, "tool_choice"),
        ({"tools": {}}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{}]}, "tools[0].function"),
        ({"tools": [FUNCTION, {"type": "web_search"}]}, "tools[1].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a\nb"}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters.type",
        ),
        ({"tools": [{"function": {"name": "f", "parameters": DEEP}}]}, "tools[0].function.parameters"),
        ({"tools": [{"function": {"name": "f", "description": 5}}]}, "tools[0].function.description"),
        ({"tools": [{"function": {"name": "f", "strict": "yes"}}]}, "tools[0].function.strict"),
        ({"tools": [FUNCTION] * 1025}, "tools"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "now"}}}, "tool_choice.type"),
        ({"tool_choice": FUNCTION}, "tool_choice"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"thinking_token_budget": 2**31}, "thinking_token_budget"),
    ],
)
def test_refused(http: httpx.Client, more: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        assert is_error(http.post(PATH, json=fields("Hi", stream=stream, **more)), 400, param)


@pytest.mark.slow
def test_servers_that_find_no_calls() -> None:
    """The message says which flag would help."""
    for template, options, message in (
        (TEMPLATE, {}, "--tool-call-parser hermes"),
        (TEMPLATE, {"tool_call_parser": "hermes", "enable_auto_tool_choice": False}, "--no-enable-auto-tool-choice"),
        ("{{ messages[0].content }}", {"tool_call_parser": "hermes"}, "--chat-template"),
    ):
        with run_server(chat_template=template, **options) as server, server.client() as http:
            response = http.post(PATH, json=fields("Hi"))
            assert is_error(response, 400, None, "unsupported_parameter")
            assert message in response.json()["error"]["message"]
            assert http.post(PATH, json=fields("Hi", tool_choice="none")).status_code == 200


@pytest.mark.slow
def test_tags_that_are_special_tokens(tmp_path: Path) -> None:
    """Mistral's: they are in the text that is parsed, though special tokens are not shown."""
    write_tokenizer(tmp_path)
    add_special_tokens(tmp_path, "[TOOL_CALLS]", "[ARGS]", "[INST]")
    options = {"tool_call_parser": "mistral", "chat_template": "{{ messages[-1].content }}{{ tools and '' }}"}
    engine = engine_config(tokenizer_path=str(tmp_path))
    with run_server(engine=engine, **options) as server, server.client() as http:
        tokens = load_tokenizer(str(tmp_path))
        for text in ("[TOOL_CALLS]now[ARGS]{}", '[TOOL_CALLS] [{"name": "now", "arguments": {}}]'):
            asked = fields(text, max_tokens=len(tokens.encode(text)))
            choice = http.post(PATH, json=asked).json()["choices"][0]
            (call,) = choice["message"]["tool_calls"]
            assert call["function"] == {"name": "now", "arguments": "{}"}
            assert len(call["id"]) == 9
            assert not post_stream(http, PATH, asked).text()
            plain = http.post(PATH, json=asked | {"tool_choice": "none"}).json()["choices"][0]
            assert "TOOL_CALLS" not in plain["message"]["content"]
