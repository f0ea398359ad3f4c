"""What both libraries make of what users ask for: outputs that follow it, or a refusal."""

import contextlib
import json
import random
import re
from collections import deque
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.grammars import (
    END,
    allowed_tokens,
    allows,
    compiled,
    random_output,
    refusal,
    spec,
)
from tokenmill_engine.config.structured_output import MAX_WHITESPACE
from tokenmill_engine.messages import StructuredKind, StructuredSpec
from tokenmill_engine.structured_output import xgrammar_backend
from tokenmill_engine.structured_output.backends import CompilingBackend, order_of
from tokenmill_engine.structured_output.grammar import Grammar, GrammarError
from tokenmill_engine.structured_output.guidance_backend import GuidanceBackend
from tokenmill_engine.structured_output.xgrammar_backend import XgrammarBackend

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 130}},
    "required": ["name"],
}
LARK = 'start: "yes" | "no" ("," start)?'
EBNF = 'root ::= "yes" | "no" ("," root)?'

keys = st.sampled_from(["a", "b", "long name", 'q"'])
scalars = st.one_of(
    st.fixed_dictionaries({"type": st.just("string")}, optional={"minLength": st.integers(0, 3)}),
    st.fixed_dictionaries({"type": st.just("string"), "pattern": st.sampled_from(["^a+b?$", "a", "^(a|b){2}$"])}),
    st.fixed_dictionaries({"type": st.just("string"), "maxLength": st.integers(3, 5)}),
    st.fixed_dictionaries(
        {"type": st.just("integer")}, optional={"minimum": st.integers(-20, 20), "maximum": st.integers(21, 2000)}
    ),
    st.fixed_dictionaries({"type": st.just("integer")}, optional={"exclusiveMinimum": st.integers(-5, 5)}),
    st.sampled_from(
        [{"type": "boolean"}, {"type": "null"}, {"const": "x"}, {"type": "number", "minimum": 1, "maximum": 2}]
    ),
    st.lists(st.sampled_from(["red", 1, True, None, "gr\u00fcn", 2.5]), min_size=1, max_size=3, unique_by=repr).map(
        lambda values: {"enum": values}
    ),
    st.sampled_from([{"type": ["integer", "null"]}, {"type": "integer", "multipleOf": 3}, {"enum": [{"a": [1]}]}]),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.dictionaries(keys, inner, min_size=1, max_size=3).flatmap(
        lambda properties: st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.just(properties)},
            optional={
                "required": st.lists(st.sampled_from(sorted(properties)), unique=True),
                "additionalProperties": st.one_of(st.booleans(), inner),
            },
        )
    )
    arrays = st.fixed_dictionaries(
        {"type": st.just("array"), "items": inner}, optional={"minItems": st.integers(0, 2), "maxItems": st.just(3)}
    )
    unions = st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts})
    together = st.tuples(inner, inner).map(lambda parts: {"allOf": list(parts)})
    return st.one_of(objects, objects, arrays, unions, together)


schemas = st.recursive(scalars, containers, max_leaves=5)


@pytest.mark.parametrize("name", ["xgrammar", "guidance"])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(schema=schemas, seed=st.integers(0, 2**32), whitespace=st.booleans(), others=st.booleans())
def test_outputs_follow_the_schema(
    name: str, schema: Any, seed: int, whitespace: bool, others: bool, request: pytest.FixtureRequest
) -> None:
    """Whatever a library does not refuse it keeps to."""
    backend: CompilingBackend = request.getfixturevalue(name)
    wanted = spec("json", schema, any_whitespace=whitespace, additional_properties=others)
    if refusal(backend, wanted) is not None:
        return
    output = random_output(compiled(backend, wanted), random.Random(seed))
    if output is not None:
        jsonschema.validate(json.loads(output), schema)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(schema=schemas, seed=st.integers(0, 2**32), whitespace=st.booleans())
def test_what_is_forced_is_all_that_may_follow(
    guidance: GuidanceBackend, schema: Any, seed: int, whitespace: bool
) -> None:
    """Token by token, wherever an output has come to."""
    wanted = spec("json", schema, any_whitespace=whitespace)
    if refusal(guidance, wanted) is not None:
        return
    grammar = compiled(guidance, wanted)
    output = random_output(grammar, random.Random(seed))
    if output is None:
        return
    matcher, forced = grammar.matcher(), deque[int]()
    for byte in output.encode():
        told = matcher.forced()
        assert told[: len(forced)] == list(forced)[: len(told)]
        forced.extend(told[len(forced) :])
        if forced:
            assert np.flatnonzero(allowed_tokens(matcher)).tolist() == [byte]
            assert forced.popleft() == byte
        matcher.accept(byte)
    assert not forced


def test_names_of_properties_are_forced(guidance: GuidanceBackend) -> None:
    matcher = compiled(guidance, spec("json", PERSON, any_whitespace=False)).matcher()
    assert bytes(matcher.forced()).startswith(b'{"name":')
    for byte in b'{"name": "':
        matcher.accept(byte)
    assert matcher.forced() == []


@pytest.mark.parametrize("name", ["xgrammar", "guidance"])
@pytest.mark.parametrize("grammar", ['start: "ab" start', 'start: /[a-c]{5}/ loop\nloop: "ab" loop'])
def test_what_never_ends_is_not_looked_at_for_ever(name: str, grammar: str, request: pytest.FixtureRequest) -> None:
    backend: CompilingBackend = request.getfixturevalue(name)
    wanted = spec("grammar", grammar)
    if refusal(backend, wanted) is not None:
        return
    matcher = compiled(backend, wanted).matcher()
    with contextlib.suppress(GrammarError):
        for _ in range(40):
            assert len(matcher.forced()) < 100_000
            matcher.accept(int(np.flatnonzero(allowed_tokens(matcher))[0]))


@pytest.mark.parametrize(
    ("schema", "forbidden"),
    [
        ({"type": "number", "multipleOf": 3}, "4"),
        ({"type": "string", "pattern": "^a+$", "minLength": 3}, '"aa"'),
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "2"),
        ({"anyOf": [{"type": "integer"}], "type": "integer", "minimum": 5}, "4"),
        ({"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n", "minimum": 3}, "2"),
        ({"enum": [1, "a"], "type": "string"}, "1"),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 1]"),
        ({"not": {"type": "integer"}}, "1"),
        ({"if": {"type": "integer"}, "then": {"minimum": 3}}, "2"),
        ({"minimum": 3}, "2"),
        ({"required": ["a"]}, "{}"),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, "{}"),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}}, '{"a": 1}'),
        ({"type": "string", "format": "date"}, '"tomorrow"'),
        ({"$ref": "http://example.com/schema"}, "1"),
    ],
)
def test_nothing_of_a_schema_is_ignored(
    xgrammar: XgrammarBackend, guidance: GuidanceBackend, schema: Any, forbidden: str
) -> None:
    """Each library either keeps to it or says that it does not."""
    tag = {"type": "tag", "begin": "<", "content": {"type": "json_schema", "json_schema": schema}, "end": ">"}
    within = spec("structural_tag", {"type": "structural_tag", "format": tag})
    for backend in (xgrammar, guidance):
        for wanted, text in ((spec("json", schema), forbidden), (within, f"<{forbidden}>")):
            assert refusal(backend, wanted) is not None or not allows(compiled(backend, wanted), text)


@pytest.mark.parametrize("name", ["xgrammar", "guidance"])
def test_objects_hold_what_the_schema_names(name: str, request: pytest.FixtureRequest) -> None:
    backend = request.getfixturevalue(name)
    closed = compiled(backend, spec("json", PERSON))
    opened = compiled(backend, spec("json", PERSON, additional_properties=True))
    for text, by_closed in (
        ('{"name": "x"}', True),
        ('{"name": "x", "age": 5}', True),
        ('{"name": "x", "q": 5}', False),
    ):
        assert allows(closed, text) == by_closed
        assert allows(opened, text)
    assert not allows(opened, '{"age": 5}')


@pytest.mark.parametrize("name", ["xgrammar", "guidance"])
def test_whitespace(name: str, request: pytest.FixtureRequest) -> None:
    backend = request.getfixturevalue(name)
    free = compiled(backend, spec("json", PERSON))
    tight = compiled(backend, spec("json", PERSON, any_whitespace=False))
    assert allows(free, '{\n  "name":"x"\n}')
    assert allows(free, '{"name":' + " " * MAX_WHITESPACE + '"x"}')
    assert not allows(free, '{"name":' + " " * (MAX_WHITESPACE + 1) + '"x"}')
    assert allows(tight, json.dumps({"name": "x", "age": 1}))
    assert not allows(tight, '{"name":"x"}')


def test_a_pattern_of_whitespace(xgrammar: XgrammarBackend, guidance: GuidanceBackend) -> None:
    wanted = spec("json", PERSON, whitespace_pattern="[\\t]?")
    assert "whitespace_pattern" in (refusal(xgrammar, wanted) or "")
    grammar = compiled(guidance, wanted)
    assert allows(grammar, '{"name":\t"x"}')
    assert not allows(grammar, '{"name": "x"}')


@pytest.mark.parametrize("name", ["xgrammar", "guidance"])
@pytest.mark.parametrize(
    ("wanted", "right", "wrong"),
    [
        (StructuredSpec(StructuredKind.JSON_OBJECT, ""), ['{"a": [1, null]}', "{}"], ["[]", "1", "{a: 1}"]),
        (spec("regex", "[a-c]{2}-\\d+"), ["ab-1", "cc-123"], ["ab-", "a-1", "abc-1"]),
        (
            spec("choice", ["red", "reddish", 'q"\\\n', "gr\u00fcn"]),
            ["red", "reddish", 'q"\\\n', "gr\u00fcn"],
            ["re", "redd"],
        ),
        (
            spec("choice", ["a/b", "[x]{2}|(y)*+?.^$", "~&#-", " ", "\x00\t"]),
            ["a/b", "[x]{2}|(y)*+?.^$", "~&#-", "\x00\t"],
            ["x"],
        ),
        (spec("grammar", LARK), ["yes", "no,no,yes"], ["", "no,", "maybe"]),
        (spec("grammar", EBNF), ["yes", "no,no,yes"], ["", "no,", "maybe"]),
    ],
)
def test_what_may_be_asked_for(
    name: str, wanted: StructuredSpec, right: list[str], wrong: list[str], request: pytest.FixtureRequest
) -> None:
    grammar = compiled(request.getfixturevalue(name), wanted)
    assert [text for text in right if not allows(grammar, text)] == []
    assert [text for text in wrong if allows(grammar, text)] == []


TOO_LARGE = pytest.param("^a{5000}{5000}$", marks=pytest.mark.slow)


@pytest.mark.parametrize("regex", ["[a", "(?<=x)y", "\\", "a\\", "(a", TOO_LARGE, "(a)\\1"])
def test_regexes_that_are_none(guidance: GuidanceBackend, regex: str) -> None:
    for wanted in (spec("regex", regex), spec("json", {"type": "string", "pattern": regex})):
        assert refusal(guidance, wanted)


@pytest.mark.parametrize(
    ("kind", "wanted", "said"),
    [
        ("regex", "ab[c", "in the regex ab[c, at character 3: unclosed character class"),
        ("regex", "x\ny(", "in the regex x\\ny(, at character 5: unclosed group"),
        ("regex", "a^", "in the regex a^: ^ is supported at the beginning only"),
        ("regex", "\\ba", "in the regex \\ba: \\b is not supported"),
        (
            "json",
            {"type": "string", "pattern": "*"},
            "in the regex *, at character 1: repetition operator missing expression",
        ),
        ("grammar", "start: /(/", "in the regex (, at character 1: unclosed group"),
        ("regex", "[" + 99 * "a", f"in the regex [{79 * 'a'}..., at character 1: unclosed character class"),
        *(
            (kind, wanted, "it allows no finite output: nothing fits it, or what does never ends")
            for kind, wanted in (
                ("json", {"$ref": "#"}),
                ("json", {"anyOf": [{"$ref": "#"}]}),
                ("regex", "[^\\s\\S]"),
                ("grammar", 'start: start "a"'),
            )
        ),
    ],
)
def test_what_is_wrong_is_told_in_plain_words(guidance: GuidanceBackend, kind: str, wanted: Any, said: str) -> None:
    """Nothing of what is made around a regex."""
    assert refusal(guidance, spec(kind, wanted)) == said


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(["a", "[ab]", "(a|bb)*", "\\d{2}", "(ab)?", "[^a]", "3+", "\\."]), min_size=1, max_size=5
    ),
    seed=st.integers(0, 2**32),
)
def test_outputs_match_the_regex(parts: list[str], seed: int, guidance: GuidanceBackend) -> None:
    regex = "".join(parts)
    output = random_output(compiled(guidance, spec("regex", regex)), random.Random(seed))
    assert output is None or re.fullmatch(regex, output)


def test_structural_tags(xgrammar: XgrammarBackend, guidance: GuidanceBackend) -> None:
    content = {"type": "json_schema", "json_schema": PERSON}
    tags = [{"begin": "<f>", "content": content, "end": "</f>"}]
    tag = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f>"], "tags": tags}}
    for backend in (xgrammar, guidance):
        grammar = compiled(backend, spec("structural_tag", tag))
        assert allows(grammar, 'so <f>{"name": "x"}</f> it is')
        assert not allows(grammar, "so <f>{}</f>")
        assert refusal(backend, spec("structural_tag", {"type": "structural_tag", "format": {"type": "nothing"}}))


def test_strings_of_structural_tags_are_strings_of_json(xgrammar: XgrammarBackend) -> None:
    """Their lengths are kept where they are short, else refused."""

    def grammar(**lengths: int) -> Grammar:
        schema = {"type": "array", "items": {"type": "string", **lengths}}
        content = {"type": "json_schema", "json_schema": schema}
        tag = {"type": "tag", "begin": "<", "content": content, "end": ">"}
        return compiled(xgrammar, spec("structural_tag", {"type": "structural_tag", "format": tag}))

    short, free = grammar(minLength=2, maxLength=3), grammar()
    for text, by_short in (
        ('"ab"', True),
        ('"\u00e9\u20ac"', True),
        ('"a"', False),
        ('"abcd"', False),
        ('"a\x03"', False),
    ):
        assert allows(short, f"<[{text}]>") == by_short
        assert allows(free, f"<[{text}]>") == ("\x03" not in text)
    with pytest.raises(GrammarError, match="maxLength is not supported"):
        grammar(maxLength=5000)


@pytest.mark.parametrize("name", ["xgrammar", "guidance"])
def test_outputs_of_one_grammar_do_not_meet(name: str, request: pytest.FixtureRequest) -> None:
    grammar = compiled(request.getfixturevalue(name), spec("choice", ["ab", "cd"]))
    first, second = grammar.matcher(), grammar.matcher()
    first.accept(ord("a"))
    assert allowed_tokens(second)[[ord("a"), ord("c")]].all()
    assert np.flatnonzero(allowed_tokens(first)).tolist() == [ord("b")]
    first.accept(ord("b"))
    assert np.flatnonzero(allowed_tokens(first)).tolist() == [END]
    with pytest.raises(GrammarError):
        second.accept(ord("b"))
    assert grammar.num_bytes > 0


def test_who_compiles_what() -> None:
    schema, lark, ebnf = spec("json", PERSON), spec("grammar", LARK), spec("grammar", EBNF)
    for each in (schema, spec("regex", "a"), spec("choice", ["a"]), StructuredSpec(StructuredKind.JSON_OBJECT, "")):
        assert order_of("auto", each) == ("guidance",)
    assert order_of("auto", spec("structural_tag", {})) == ("guidance", "xgrammar")
    assert order_of("auto", lark)[0] == "guidance"
    assert order_of("auto", ebnf)[0] == "xgrammar"
    assert order_of("xgrammar", lark) == ("xgrammar",)
    assert order_of("guidance", schema) == ("guidance",)


def test_masks_that_take_too_long_end_their_request(xgrammar: XgrammarBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library itself would go on for minutes, and all other requests wait."""
    grammar = compiled(xgrammar, spec("grammar", EBNF))
    matcher, bits = grammar.matcher(), np.zeros((1, 9), np.int32)
    matcher.fill(bits, 0)
    monkeypatch.setattr(xgrammar_backend, "_MAX_TOKEN_S", 0.0)
    with pytest.raises(GrammarError, match="too ambiguous"):
        matcher.fill(bits, 0)
    with pytest.raises(GrammarError, match="too ambiguous"):
        matcher.accept(ord("y"))
