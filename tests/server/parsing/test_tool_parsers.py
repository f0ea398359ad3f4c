"""Every parser on every output, however it is cut."""

import json
import string
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tool_outputs import BY_PARSER, TOOLS, Output
from tokenmill_server.parsing.chat_output import ChatDelta
from tokenmill_server.parsing.plan import OutputPlan, ToolPlan
from tokenmill_server.processing.sse import json_bytes

CASES = [
    pytest.param(name, output, id=f"{name}-{i}") for name, all_ in BY_PARSER.items() for i, output in enumerate(all_)
]


def plan_of(parser: str, **changes: Any) -> OutputPlan:
    return OutputPlan(ToolPlan(TOOLS, parser, **changes))


def streamed(plan: OutputPlan, pieces: list[str]) -> tuple[str, list[tuple[str | None, str]]]:
    """(content, calls), from deltas as a client joins them."""
    output = plan.output()
    deltas = [output.push(piece) for piece in pieces] + [output.finish()]
    calls: list[list[Any]] = []
    for part in (part for delta in deltas for part in delta.calls):
        assert (part.index == len(calls)) == (part.id is not None) == (part.name is not None)
        if part.id is not None:
            calls.append([part.name, ""])
        assert part.index == len(calls) - 1
        calls[part.index][1] += part.arguments
    assert output.num_calls == len(calls)
    return "".join(delta.content for delta in deltas), [(name, arguments) for name, arguments in calls]


def whole(delta: ChatDelta) -> tuple[str, list[tuple[str | None, str]]]:
    return delta.content, [(call.name, call.arguments) for call in delta.calls]


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(ends)]


@pytest.mark.parametrize(("parser", "output"), CASES)
def test_output(parser: str, output: Output) -> None:
    plan = plan_of(parser)
    content, calls = whole(plan.parse(output.text))
    assert (content, tuple((name, json.loads(arguments)) for name, arguments in calls)) == (
        output.content,
        output.calls,
    )
    assert streamed(plan, list(output.text)) == (content, calls), "character by character"
    for place in range(1, len(output.text)):
        assert streamed(plan, [output.text[:place], output.text[place:]]) == (content, calls), place
        partial = output.text[:place]
        assert streamed(plan, list(partial)) == whole(plan.parse(partial)), f"ends at {place}"


@pytest.mark.parametrize("parser", BY_PARSER)
@given(data=st.data())
def test_any_text_in_any_pieces(parser: str, data: st.DataObject) -> None:
    """Also what no model writes: pieces of outputs of all formats, mixed."""
    fragments = st.sampled_from([output.text for each in BY_PARSER.values() for output in each])
    piece = st.builds(
        lambda text, a, b: text[a % (len(text) + 1) :][: b + 1], fragments, st.integers(0), st.integers(0, 40)
    )
    text = "".join(data.draw(st.lists(fragments | piece | st.text(max_size=5), max_size=4)))
    plan = plan_of(parser)
    expected = whole(plan.parse(text))
    assert streamed(plan, cut(text, data.draw(st.lists(st.integers(0, 999), max_size=12)))) == expected
    assert streamed(plan, list(text)) == expected


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", '<tool_call>{"name": "\\udc00", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"\\ud800\\"}"}</tool_call>'),
        ("pythonic", '[get_weather(city="\\ud800")]'),
    ],
)
def test_halves_of_characters_reach_nobody(parser: str, text: str) -> None:
    """JSON can say them, but no answer could hold them."""
    _, ((name, arguments),) = whole(plan_of(parser).parse(text))
    assert name is not None
    assert json.loads(json_bytes([name, arguments])) == [name, arguments]


def test_arguments_are_streamed_as_they_come() -> None:
    start = {
        "hermes": '<tool_call>{"name": "write_file", "arguments": {"text": "lo',
        "llama3_json": '{"name": "write_file", "parameters": {"text": "lo',
        "mistral": '[TOOL_CALLS]write_file[ARGS]{"text": "lo',
        "qwen3_coder": "<tool_call>\n<function=write_file>\n<parameter=text>\nlo",
        "pythonic": "[write_file(text='lo', path='x",
    }
    for parser, text in start.items():
        (call,) = plan_of(parser).output().push(text).calls
        assert call.name == "write_file"
        assert call.arguments.startswith('{"text": "lo'), parser


def test_only_the_first_call() -> None:
    text = '<tool_call>{"name": "now"}</tool_call>\n<tool_call>{"name": "get_weather"}</tool_call>\nBye'
    delta = plan_of("hermes", parallel=False).parse(text)
    assert whole(delta) == ("Bye", [("now", "{}")])


def test_ids() -> None:
    text = "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}"
    long, short = plan_of("mistral").parse(text), plan_of("mistral", short_ids=True).parse(text)
    assert all(call.id is not None and call.id.startswith("chatcmpl-tool-") for call in long.calls)
    for call in short.calls:
        assert call.id is not None
        assert len(call.id) == 9
        assert set(call.id) <= set(string.ascii_letters + string.digits)
    assert len({call.id for call in long.calls + short.calls}) == 4


@given(
    calls=st.lists(st.tuples(st.sampled_from(["now", "other"]), st.dictionaries(st.text(), st.text())), min_size=1),
    places=st.lists(st.integers(0, 999)),
)
def test_forced_calls(calls: list[tuple[str, dict[str, str]]], places: list[int]) -> None:
    text = json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls], ensure_ascii=False)
    plan = OutputPlan(ToolPlan(TOOLS, None, forced=True))
    content, found = streamed(plan, cut(text, places))
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert plan.finish_reason("stop", len(found)) == "tool_calls"


def test_forced_arguments_and_finish_reasons() -> None:
    plan = OutputPlan(ToolPlan(TOOLS, None, function="now"))
    assert streamed(plan, ['{"a"', ": 1}"]) == ("", [("now", '{"a": 1}')])
    assert plan.finish_reason("stop", 1) == "stop", "as of a function that the client named"
    automatic = plan_of("hermes")
    assert [automatic.finish_reason(*each) for each in (("stop", 1), ("stop", 0), ("length", 1))] == [
        "tool_calls",
        "stop",
        "length",
    ]
