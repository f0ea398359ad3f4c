"""Conversations with calls and their results through templates that insist on different things."""

import json
from typing import Any

import pytest

from tests.support.tool_outputs import TEMPLATES, TOOLS
from tokenmill_engine.errors import InvalidRequestError
from tokenmill_server.parsing.plan import OutputPlan, ToolPlan
from tokenmill_server.processing.chat_template import ChatTemplate
from tokenmill_server.processing.tool_history import check_history

USER = {"role": "user", "content": "Weather?"}


def call(arguments: Any, name: str = "get_weather") -> dict[str, Any]:
    return {"id": "abcdefgh1", "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


RESULT = {"role": "tool", "tool_call_id": "abcdefgh1", "content": "sunny"}


def render(template: str, *messages: dict[str, Any], **variables: Any) -> str:
    return ChatTemplate(template, "<s>", "</s>").render([USER, *messages], True, variables)


@pytest.mark.parametrize("name", TEMPLATES)
def test_round_trip(name: str) -> None:
    """What a template writes of calls is what the parser reads as these calls."""
    arguments = {"city": 'Zürich "X" <b>', "days": 2, "tags": ["a", "b'c"], "where": {"x": [1.5]}, "detailed": True}
    calls = [call(json_text) for json_text in [json.dumps(arguments)] + ["{}"] * (name != "llama3_json")]
    text = render(TEMPLATES[name], calling(*calls), RESULT, tools=[{"function": {"name": "get_weather"}}])
    assert "sunny" in text
    assert "None" not in text
    before = render(TEMPLATES[name], tools=[{"function": {"name": "get_weather"}}]).removesuffix(
        "<|im_start|>assistant\n"
    )
    written = text.removeprefix(before).removeprefix("<|im_start|>assistant\n").partition("<|im_end|>")[0]
    delta = OutputPlan(ToolPlan(TOOLS, name)).parse(written.partition("</s>")[0])
    assert delta.content.strip() == ""
    found = [json.loads(part.arguments) for part in delta.calls]
    assert found == [arguments] + [{}] * (name != "llama3_json")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ m.tool_calls[0].function.arguments | tojson }}|{{ m.content is none }}", '{"city": "Paris"}|True'),
        ("{{ 'args ' + m.tool_calls[0].function.arguments }}|{{ m.content is none }}", 'args {"city": "Paris"}|True'),
        ("{{ m.content + '|' }}{{ m.tool_calls[0].function.arguments | tojson }}", '|{"city": "Paris"}'),
        ("{{ m.content }}|{{ m.tool_calls[0].function.arguments | tojson }}", '|{"city": "Paris"}'),
        ("{{ m.content + '|' + m.tool_calls[0].function.arguments }}", '|{"city": "Paris"}'),
    ],
)
@pytest.mark.parametrize("arguments", ['{"city": "Paris"}', {"city": "Paris"}])
def test_templates_get_what_they_take(source: str, expected: str, arguments: Any) -> None:
    """Arguments as an object or as text; null beside calls, or an empty text."""
    template = "{% for m in messages if m.tool_calls %}" + source + "{% endfor %}"
    assert render(template, calling(call(arguments)), RESULT) == expected


def test_arguments_that_are_no_json_stay_what_the_model_wrote() -> None:
    text = render(TEMPLATES["hermes"], calling(call('{"city": "Par')), RESULT)
    assert '"arguments": "{\\"city\\": \\"Par"' in text


def test_arguments_with_halves_of_characters_stay_what_the_model_wrote() -> None:
    """JSON can say them, but no prompt can hold them."""
    text = render(TEMPLATES["hermes"], calling(call('{"city": "\\ud800"}')), RESULT)
    assert "\\ud800" in text
    assert text.encode()


def test_no_arguments() -> None:
    for arguments in ("", None, "{}", {}):
        assert '"arguments": {}' in render(TEMPLATES["hermes"], calling(call(arguments)))


def test_no_calls_after_all() -> None:
    text = render(TEMPLATES["mistral"], {"role": "assistant", "content": "Hi", "tool_calls": []})
    assert "TOOL_CALLS" not in text
    assert text.endswith("Hi</s>")


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thinking_under_either_name(name: str) -> None:
    message = check_history({"role": "assistant", "content": None, name: "Hmm"}, "messages[1]")
    template = (
        "{% for m in messages %}{{ m.reasoning_content or '' }}|{{ m.reasoning or '' }}|{{ m.content }};{% endfor %}"
    )
    assert render(template, message) == "||Weather?;Hmm|Hmm|;"


def test_only_the_assistant_calls() -> None:
    with pytest.raises(InvalidRequestError) as raised:
        check_history({**USER, "tool_calls": [call("{}")]}, "messages[0]")
    assert raised.value.param == "messages[0].tool_calls"
