from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill_server.parsing.plan import OutputPlan, ToolPlan
from tokenmill_server.parsing.reasoning import ReasoningCounter, ReasoningSplitter, Start, start_after, start_within


def split(start: Start, pieces: list[str]) -> tuple[str, str]:
    splitter = ReasoningSplitter(start)
    parts = [splitter.push(piece) for piece in pieces] + [splitter.finish()]
    return "".join(thinking for thinking, _ in parts), "".join(answer for _, answer in parts)


@pytest.mark.parametrize(
    ("start", "text", "thinking", "answer"),
    [
        (Start.TAG, "<think>\nOne,\n\ntwo.\n</think>\n\nThree", "One,\n\ntwo.", "Three"),
        (Start.TAG, "<think>\n\n</think>\n\nThree", "", "Three"),
        (Start.TAG, " \n<think>a</think>b</think>", "a", "b</think>"),
        (Start.TAG, "\n Three <think>four</think>", "", "\n Three <think>four</think>"),
        (Start.TAG, "<thin air", "", "<thin air"),
        (Start.TAG, "<think>\nOne\n</thi", "One\n</thi", ""),
        (Start.TAG, "<thi", "", "<thi"),
        (Start.THINKING, "One.\n</think>\n\nTwo\n", "One.", "Two\n"),
        (Start.THINKING, "<think>\nOne.\n</think>\n\nTwo", "One.", "Two"),
        (Start.THINKING, "One </thought> a < b\n\n", "One </thought> a < b", ""),
        (Start.THINKING, "</think>\n\n  Two", "", "  Two"),
        (Start.ANSWER, "<think>One</think>\n", "", "<think>One</think>\n"),
        (Start.TAG, "", "", ""),
    ],
)
def test_split(start: Start, text: str, thinking: str, answer: str) -> None:
    assert split(start, [text]) == (thinking, answer)
    assert split(start, list(text)) == (thinking, answer)
    for place in range(len(text)):
        assert split(start, [text[:place], text[place:]]) == (thinking, answer)


@given(
    parts=st.lists(st.sampled_from(["<think>", "</think>", "\n", " ", "<", "</th", "a", "thought.", "\r\n", ">"])),
    start=st.sampled_from(Start),
    places=st.lists(st.integers(0, 99)),
)
def test_any_text_in_any_pieces(parts: list[str], start: Start, places: list[int]) -> None:
    text = "".join(parts)
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    assert split(start, [text[a:b] for a, b in pairwise(ends)]) == split(start, [text])


@given(
    parts=st.lists(st.sampled_from([b"<think>", b"</think>", b"</", b"think", b">", b"\n", b"a", b"\xc3", b""])),
    start=st.sampled_from(Start),
    sizes=st.lists(st.integers(1, 4)),
)
def test_tokens_are_counted_as_the_text_is_split(parts: list[bytes], start: Start, sizes: list[int]) -> None:
    """Thinking ends with the token that completes the tag, however many tokens come at a time."""
    counter = ReasoningCounter(start, parts)
    position = 0
    for size in [*sizes, *[1] * len(parts)]:
        counter.count(range(position, min(position + size, len(parts))))
        position = min(position + size, len(parts))
    expected, thinks = 0, start is Start.THINKING
    text = ""
    for index, part in enumerate(parts):
        text += part.decode("latin-1")
        if start is Start.TAG and text.lstrip().startswith("<think>"):
            thinks = True
        if thinks:
            expected = index + 1
            if "</think>" in text:
                break
    assert counter.num_tokens == expected


def test_prompts_say_where_the_output_begins() -> None:
    assert start_after("<|assistant|>\n", always_thinks=False) is Start.TAG
    assert start_after("What is <think>?<|assistant|>\n", always_thinks=False) is Start.TAG
    assert start_after("<|assistant|>\n", always_thinks=True) is Start.THINKING
    assert start_after("<|assistant|><think>\n", always_thinks=False) is Start.THINKING
    assert start_after("<|assistant|><think>\n\n</think>\n\n", always_thinks=True) is Start.ANSWER
    assert start_within("<think>\nI was about to") is Start.THINKING
    assert start_within("<think>\nI was.</think> So") is Start.ANSWER
    assert start_within("So") is Start.ANSWER
    assert start_within(" ") is Start.TAG


def test_calls_are_looked_for_in_the_answer_alone() -> None:
    call = '<tool_call>{"name": "now"}</tool_call>'
    delta = OutputPlan(ToolPlan({"now": {}}, "hermes"), Start.TAG).parse(f"<think>{call}</think>\n\nI call.\n{call}")
    assert (delta.reasoning, delta.content) == (call, "I call.")
    assert [(part.name, part.arguments) for part in delta.calls] == [("now", "{}")]
