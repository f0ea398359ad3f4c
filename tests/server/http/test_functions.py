"""Functions, as tools were called before, and tools of which some are allowed. The engine repeats the last message."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.http.test_tools import CALLS, FUNCTIONS, PATH, TEMPLATE, fields
from tests.support.api_server import Server, run_server
from tests.support.sse import is_error, post_stream

CALLED = {"name": "get_weather", "arguments": '{"city": "Zürich"}'}


@pytest.fixture(scope="module")
def tool_server() -> Iterator[Server]:
    with run_server(chat_template=TEMPLATE, tool_call_parser="hermes") as server:
        yield server


@pytest.fixture(scope="module")
def http(tool_server: Server) -> Iterator[httpx.Client]:
    with tool_server.client() as client:
        yield client


def with_functions(output: str, **more: Any) -> dict[str, Any]:
    functions = [tool["function"] for tool in FUNCTIONS]
    return {**fields(output, functions=functions), "tools": None, **more}


def test_a_call(http: httpx.Client, tool_server: Server) -> None:
    """One, and not in a list; the prompt is that of the same tools."""
    asked = with_functions(f"I look.\n{CALLS}", return_prompt_text=True)
    reply = http.post(PATH, json=asked)
    choice = reply.json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("function_call", "I look.")
    assert choice["message"]["function_call"] == CALLED
    assert "tool_calls" not in choice["message"]
    assert "x-ignored-fields" not in reply.headers
    tools = http.post(PATH, json=fields(f"I look.\n{CALLS}", return_prompt_text=True)).json()
    assert reply.json()["prompt_text"] == tools["prompt_text"]
    stream = post_stream(http, PATH, asked)
    parts = [each["delta"]["function_call"] for each in stream.choices() if "function_call" in each["delta"]]
    assert [part["name"] for part in parts if "name" in part] == ["get_weather"]
    assert "".join(part["arguments"] for part in parts) == CALLED["arguments"]
    assert (stream.text(), stream.finish_reason()) == ("I look.", "function_call")
    with openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0) as client:
        messages, functions = asked["messages"], asked["functions"]
        whole = client.chat.completions.create(model="smol", messages=messages, functions=functions, temperature=0)
        called = whole.choices[0].message.function_call
        assert called is not None
        assert called.model_dump() == CALLED


def test_a_call_that_the_client_chooses(http: httpx.Client, tool_server: Server) -> None:
    asked = with_functions('{"city": "Zürich"}', function_call={"name": "get_weather"})
    choice = http.post(PATH, json=asked).json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["function_call"]) == ("stop", CALLED)
    spec = tool_server.engines[0].added[-1].sampling.structured
    assert spec is not None
    assert spec.param == "functions"
    choice = http.post(PATH, json=with_functions(CALLS, function_call="none")).json()["choices"][0]
    assert choice["message"]["content"] == CALLS


def test_a_conversation_with_functions(http: httpx.Client) -> None:
    """As one with tools."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.tool_call_id }}{{ m.content }}"
        "{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    )
    old = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "function_call": CALLED},
        {"role": "function", "name": "get_weather", "content": "Sunny"},
        {"role": "assistant", "content": "b", "function_call": None},
    ]
    call = {"id": "function0", "type": "function", "function": CALLED}
    new = [
        old[0],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": "get_weather", "tool_call_id": "function0", "content": "Sunny"},
        {"role": "assistant", "content": "b"},
    ]
    with run_server(chat_template=template) as server, server.client() as client:
        bodies = [{"messages": messages, "max_tokens": 1, "return_prompt_text": True} for messages in (old, new)]
        first, second = (client.post(PATH, json=body).json()["prompt_text"] for body in bodies)
    assert first == second
    assert "get_weather" in first


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"functions": []}, "functions"),
        ({"functions": [{"description": "x"}]}, "functions[0].name"),
        ({"function_call": "required"}, "function_call"),
        ({"function_call": {"name": "nobody"}}, "function_call"),
        ({"function_call": {}}, "function_call.name"),
        ({"functions": None, "function_call": "auto"}, "function_call"),
        ({"tools": FUNCTIONS}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
    ],
)
def test_what_is_wrong_is_named(http: httpx.Client, wrong: dict[str, Any], param: str) -> None:
    assert is_error(http.post(PATH, json=with_functions("Hi") | wrong), 400, param)


def allow(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_tools_that_are_allowed(http: httpx.Client, tool_server: Server) -> None:
    """The model is told of no others, and can be forced to call one of them."""
    asked = fields(CALLS, return_prompt_text=True)
    reply = http.post(PATH, json=asked | {"tool_choice": allow("auto", "get_weather")}).json()
    alone = http.post(PATH, json=asked | {"tools": [FUNCTIONS[0]]}).json()
    assert reply["prompt_text"] == alone["prompt_text"] != http.post(PATH, json=asked).json()["prompt_text"]
    assert reply["choices"][0]["finish_reason"] == "tool_calls"
    http.post(PATH, json=asked | {"tool_choice": allow("required", "now")})
    spec = tool_server.engines[0].added[-1].sampling.structured
    assert spec is not None
    assert '"now"' in spec.text
    assert "get_weather" not in spec.text
    counted = http.post("/tokenize", json=fields("Hi", tool_choice=allow("auto", "now"))).json()["count"]
    assert counted < http.post("/tokenize", json=fields("Hi")).json()["count"]


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (allow("none", "now"), "tool_choice.allowed_tools.mode"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools.mode"),
        (allow("auto"), "tool_choice.allowed_tools.tools"),
        (allow("auto", "now", "nobody"), "tool_choice.allowed_tools.tools[1]"),
        (
            json.loads(json.dumps(allow("auto", "now")).replace('"function"', '"custom"')),
            "tool_choice.allowed_tools.tools[0]",
        ),
    ],
)
def test_tools_that_cannot_be_allowed(http: httpx.Client, choice: dict[str, Any], param: str) -> None:
    assert is_error(http.post(PATH, json=fields("Hi", tool_choice=choice)), 400, param)
