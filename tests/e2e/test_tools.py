"""Calls of tools by a real model, held to their schemas by grammar, with the official client."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

from tests.support.server import Server, start_server
from tests.support.tool_outputs import TEMPLATES
from tokenmill_engine.config.model_files import EMBEDDED_MODEL_NAME

pytestmark = pytest.mark.slow

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "$defs": {"city": {"type": "string", "enum": ["Paris", "Zürich"]}},
        },
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
ASKED: dict[str, Any] = {
    "model": EMBEDDED_MODEL_NAME,
    "messages": [{"role": "user", "content": "What is the weather in Paris for two days?"}],
    "temperature": 0,
    "max_tokens": 120,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The embedded model, with a template that shows tools to it."""
    flags = ("--device", "cpu", "--dtype", "float32", "--kv-cache-memory-bytes", "256M")
    with start_server(*flags, "--chat-template", TEMPLATES["hermes"], "--reasoning-parser", "qwen3") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def check_weather(arguments: str) -> None:
    read = json.loads(arguments)
    assert read.keys() == {"city", "days"}
    assert read["city"] in ("Paris", "Zürich")
    assert read["days"] in (1, 2, 3)


@pytest.mark.parametrize("parallel", [True, False])
def test_required(client: OpenAI, parallel: bool) -> None:
    asked = {**ASKED, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": parallel}
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.message.content == ""
    calls: list[Any] = whole.message.tool_calls or []
    assert len(calls) == 1 or (parallel and calls)
    if parallel and whole.finish_reason == "length":  # a small model may call and call
        calls.pop()
    else:
        assert whole.finish_reason == "tool_calls"
    for call in calls:
        assert call.function.name == "get_weather"
        check_weather(call.function.arguments)
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
    parts = [part for delta in deltas for part in delta.tool_calls or []]
    assert not any(delta.content for delta in deltas)
    for index, call in enumerate(calls):
        streamed = [part for part in parts if part.index == index]
        assert streamed[0].function is not None
        assert streamed[0].function.name == call.function.name
        assert "".join(part.function.arguments for part in streamed) == call.function.arguments


def test_a_function_by_name(client: OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    choice = client.chat.completions.create(**ASKED, tools=[NOW, WEATHER], tool_choice=named).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("stop", "")
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    check_weather(call.function.arguments)


def test_a_conversation_about_a_call(client: OpenAI) -> None:
    """As agents have it: the streamed call goes back with its result, in the client's own objects, and is answered."""
    asked = {**ASKED, "tools": [WEATHER], "parallel_tool_calls": False}
    with client.chat.completions.stream(**asked, tool_choice="required") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert kinds.count("tool_calls.function.arguments.done") == 1
    assert kinds.count("tool_calls.function.arguments.delta") > 3
    assert final.finish_reason == "tool_calls"
    (call,) = final.message.tool_calls or []
    check_weather(call.function.arguments)

    result = {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "clear"}'}
    history = [*ASKED["messages"], final.message, result]
    body = {"return_prompt_text": True}
    answer = client.chat.completions.create(**{**asked, "messages": history}, tool_choice="none", extra_body=body)
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None
    assert answer.model_extra is not None
    prompt = answer.model_extra["prompt_text"]
    assert f'"arguments": {json.dumps(json.loads(call.function.arguments), ensure_ascii=False)}' in prompt
    assert '<tool_response>\n{"sky": "clear"}\n</tool_response>' in prompt


def test_a_function_without_parameters(client: OpenAI) -> None:
    several = client.chat.completions.create(
        **ASKED, tools=[NOW], tool_choice={"type": "function", "function": {"name": "now"}}, n=1
    )
    (call,) = several.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {}


def test_parsed_by_the_client(client: OpenAI) -> None:
    class Weather(BaseModel):
        city: str
        celsius: bool

    parsed = client.chat.completions.parse(
        **{**ASKED, "max_tokens": 400},
        tools=[pydantic_function_tool(Weather)],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    (call,) = parsed.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)


def test_calls_that_the_model_chooses(client: OpenAI) -> None:
    """It may begin with a call or end: whichever branch it takes, the call is one of those that are declared."""
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
    asked = {**ASKED, "tools": [WEATHER], "extra_body": {"structured_outputs": {"choice": [text]}}}
    choice = client.chat.completions.create(**asked).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    for call in choice.message.tool_calls or []:
        assert call.type == "function"
        check_weather(call.function.arguments)


def test_an_answer_in_json_beside_tools(client: OpenAI) -> None:
    """Agents ask for both: a call, or the answer in its form."""
    schema = {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"]}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    choice = client.chat.completions.create(**ASKED, tools=[WEATHER], response_format=wanted).choices[0]
    if choice.message.tool_calls:
        assert choice.message.content is None
    else:
        assert json.loads(choice.message.content or "").keys() == {"sunny"}


def test_thinking_that_has_to_end(client: OpenAI) -> None:
    """The prompt ends within it; after it the answer is the one that is possible."""
    thinking = {"role": "assistant", "content": "<think>\nThe user wants"}
    extra = {"continue_final_message": True, "thinking_token_budget": 8, "structured_outputs": {"choice": ["Sunny."]}}
    asked = {**ASKED, "messages": [*ASKED["messages"], thinking], "extra_body": extra}
    answer = client.chat.completions.create(**asked)
    message, usage = answer.choices[0].message, answer.usage
    assert message.content == "Sunny."
    assert message.model_extra is not None
    assert message.model_extra["reasoning"]
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert 8 <= (usage.completion_tokens_details.reasoning_tokens or 0) < usage.completion_tokens
