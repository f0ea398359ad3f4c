"""Structural tags by llguidance: what xgrammar makes of them, or a refusal, and schemas of any lengths in no time."""

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.grammars import allows, compiled, random_output, refusal, spec
from tests.support.ordinary_schemas import ORDINARY_SCHEMAS
from tokenmill_engine.structured_output.grammar import Grammar, GrammarError, NotExpressibleError
from tokenmill_engine.structured_output.guidance_backend import GuidanceBackend
from tokenmill_engine.structured_output.xgrammar_backend import XgrammarBackend

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FLAG = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
"""Its values have one spelling: the libraries differ in whether -0 is an integer."""
ANY_TEXT = {"type": "any_text"}


def tag_of(content: Any) -> Any:
    return spec("structural_tag", {"type": "structural_tag", "format": content})


def thinking(content: Any, **limit: int) -> Any:
    tag = {"type": "tag", "begin": "", "content": {**ANY_TEXT, **limit}, "end": "</think>"}
    return tag_of({"type": "sequence", "elements": [tag, {"type": "regex", "pattern": "\\n*"}, content]})


@pytest.mark.parametrize("name", ORDINARY_SCHEMAS)
def test_ordinary_schemas_after_thinking(name: str, guidance: GuidanceBackend) -> None:
    """Outputs drawn from what they allow are valid."""
    schema = ORDINARY_SCHEMAS[name]
    grammar = compiled(guidance, thinking({"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}))
    validator = jsonschema.Draft202012Validator(schema)
    for seed in range(4):
        matcher = grammar.matcher()
        for byte in b"Hm</think>":
            matcher.accept(byte)
        output = random_output(_From(matcher), random.Random(seed), 1500)
        if output is not None:
            validator.validate(json.loads(output))


class _From:
    """A grammar whose outputs have begun."""

    num_bytes = 0

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def matcher(self) -> Any:
        return self._matcher


texts = st.sampled_from(["a", "ab", "b", "<x>", "</x>", "\n", "<", "aa"])
formats = st.recursive(
    st.one_of(
        st.builds(lambda value: {"type": "const_string", "value": value}, texts),
        st.builds(
            lambda pattern: {"type": "regex", "pattern": pattern}, st.sampled_from(["a*", "[ab]+", "\\n*", "b?"])
        ),
        st.just({"type": "json_schema", "json_schema": FLAG, "max_whitespace_cnt": 1}),
        st.builds(lambda excludes: {"type": "any_text", "excludes": excludes}, st.lists(texts, max_size=1)),
    ),
    lambda inner: st.one_of(
        st.builds(lambda parts: {"type": "sequence", "elements": parts}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda parts: {"type": "or", "elements": parts}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda kind, part: {"type": kind, "content": part}, st.sampled_from(["optional", "star"]), inner),
        st.builds(
            lambda begin, part, end: {"type": "tag", "begin": begin, "content": part, "end": end}, texts, inner, texts
        ),
    ),
    max_leaves=5,
)
outputs = st.lists(
    st.sampled_from(["a", "b", "<x>", "</x>", "\n", "<", '{"a": true}', '{"a":false}', '{"b": 1}']), max_size=5
).map("".join)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(content=formats, tried=st.lists(outputs, min_size=1, max_size=6), seed=st.integers(0, 999))
def test_tags_mean_what_they_mean_to_xgrammar(
    content: Any, tried: list[str], seed: int, xgrammar: XgrammarBackend, guidance: GuidanceBackend
) -> None:
    """Each text is allowed by both or by none, also those that one of them proposes."""
    wanted = tag_of(content)
    try:
        grammar, other = compiled(guidance, wanted), compiled(xgrammar, wanted)
    except GrammarError:
        return
    proposed = [random_output(each, random.Random(seed), 60) for each in (grammar, other)]
    for text in [*tried, *filter(None, proposed)]:
        assert allows(grammar, text) == allows(other, text), text


CODER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"$ref": "#/$defs/days"},
        "note": {"type": "string", "maxLength": 4},
        "share": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "any": {},
    },
    "required": ["city", "days"],
    "$defs": {"days": {"type": "integer", "maximum": 14}},
}


@pytest.fixture(scope="module", params=["xgrammar", "guidance"])
def coder(request: pytest.FixtureRequest) -> Grammar:
    content = {"type": "json_schema", "json_schema": CODER, "style": "qwen_xml", "max_whitespace_cnt": 1}
    tag = {"type": "tag", "begin": "<f>\n", "content": content, "end": ["\n</f>", "</f>"]}
    return compiled(request.getfixturevalue(request.param), tag_of(tag))


@pytest.mark.parametrize(
    ("values", "is_allowed"),
    [
        ({"city": "Z\u00fcrich\n2 </param", "days": "3"}, True),
        ({"days": "3"}, False),
        ({"city": "a", "days": "15"}, False),
        ({"city": "a", "days": "three"}, False),
        ({"days": "3", "city": "a"}, False),
        ({"city": "", "unit": "C", "days": "3", "note": "abcd", "share": "null", "tags": '["x"]', "any": "x"}, True),
        ({"city": "a", "unit": '"C"', "days": "3"}, False),
        ({"city": "a", "days": "3", "note": "abcde"}, False),
        ({"city": "a", "days": "3", "tags": "[1]"}, False),
        ({"city": "a", "days": "3", "other": "b"}, False),
    ],
)
def test_arguments_that_are_written_one_by_one(coder: Grammar, values: dict[str, str], is_allowed: bool) -> None:
    lines = "\n".join(f"<parameter={name}>\n{value}\n</parameter>" for name, value in values.items())
    assert allows(coder, f"<f>\n{lines}\n</f>") == is_allowed


@pytest.mark.parametrize(
    ("limit", "text", "is_allowed"),
    [
        (3, 'abc</think>{"a": 1}', True),
        (3, 'ab</think>{"a": 1}', True),
        (3, 'abcd</think>{"a": 1}', False),
        (3, 'ab<</think>{"a": 1}', False),
        (0, '</think>\n{"a": 1}', True),
        (0, 'a</think>{"a": 1}', False),
        (3, 'abc</think>{"b": 1}', False),
    ],
)
def test_limits_of_thinking(guidance: GuidanceBackend, limit: int, text: str, is_allowed: bool) -> None:
    """Tokens are bytes here, so the limit is often reached within the tag, which does not count."""
    content = {"type": "json_schema", "json_schema": OBJECT}
    assert allows(compiled(guidance, thinking(content, max_tokens=limit)), text) == is_allowed


def test_lenient_schemas_are_followed_as_far_as_they_are_understood(guidance: GuidanceBackend) -> None:
    part = {"type": "json_schema", "json_schema": {**OBJECT, "not": {"required": ["b"]}}}
    assert "not" in (refusal(guidance, tag_of(part)) or "")
    grammar = compiled(guidance, tag_of({**part, "lenient": True}))
    assert allows(grammar, '{"a": 1}')
    assert not allows(grammar, '{"a": "x"}')


@pytest.mark.parametrize(
    "content",
    [
        {"type": "grammar", "grammar": 'root ::= "x"'},
        {"type": "token", "token": 5},
        {"type": "sequence", "elements": []},
        {
            "type": "sequence",
            "elements": [{"type": "regex", "pattern": "a*"}, {"type": "json_schema", "json_schema": {}}],
        },
        {"type": "any_text", "max_chars": 5},
        {"type": "tag", "begin": {"type": "token", "token": 5}, "content": ANY_TEXT, "end": "x"},
        {"type": "triggered_tags", "triggers": ["<"], "tags": [], "at_least_one": True},
        {"type": "triggered_tags", "triggers": 5, "tags": {}},
        {"type": "or", "elements": 5},
        {"type": ["any_text"]},
        5,
        None,
    ],
)
def test_what_is_left_to_xgrammar(guidance: GuidanceBackend, content: Any) -> None:
    with pytest.raises(NotExpressibleError):
        guidance.compile(tag_of(content))
