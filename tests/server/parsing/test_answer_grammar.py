"""Grammars of calls, and of answers after thinking, as the libraries of engines understand them."""

import json
from typing import Any

import numpy as np
import pytest

from tests.support.tool_outputs import TOOLS
from tokenmill_engine.config.model_files import resolve_model
from tokenmill_engine.config.structured_output import StructuredOutputConfig
from tokenmill_engine.errors import InvalidRequestError
from tokenmill_engine.messages import StructuredOutputsParams, StructuredSpec
from tokenmill_engine.structured_output.asking import BackendName
from tokenmill_engine.structured_output.backends import Backends
from tokenmill_engine.structured_output.grammar import Grammar, NotExpressibleError
from tokenmill_server.parsing.answer_grammar import Functions, after_thinking, answer_or_calls, text_with_calls
from tokenmill_server.parsing.call_schema import arguments_schema, calls_schema
from tokenmill_server.parsing.reasoning import Start
from tokenmill_server.processing.structured import spec_of
from tokenmill_server.processing.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.slow

Wanted = StructuredOutputsParams
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CALLS = (
    '<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
CODER_CALLS = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n2\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=now>\n\n</function>\n</tool_call>"
)
FUNCTIONS: dict[str, Any] = {"get_weather": TOOLS["get_weather"], "now": {}}


class Checker:
    """Whether the embedded model could write a text."""

    backend: BackendName = "guidance"

    def __init__(self) -> None:
        model = resolve_model(None)
        self._tokenizer: Tokenizer = load_tokenizer(model.tokenizer_path)
        self._end = model.eos_token_ids[0]
        self._num_words = -(-model.architecture.vocab_size // 32)
        self._backends = Backends(model.tokenizer_path, model.architecture.vocab_size, model.eos_token_ids)
        self._grammars: dict[tuple[BackendName, StructuredSpec], Grammar] = {}

    def _grammar(self, spec: StructuredSpec) -> Grammar:
        if (self.backend, spec) not in self._grammars:
            try:
                library = self._backends.of(self.backend)
                grammar = library.load(library.compile(spec))
            except NotExpressibleError:
                library = self._backends.of("xgrammar")
                grammar = library.load(library.compile(spec))
            self._grammars[self.backend, spec] = grammar
        return self._grammars[self.backend, spec]

    def allows(self, wanted: Wanted, text: str) -> bool:
        matcher = self._grammar(spec_of(wanted, StructuredOutputConfig())).matcher()
        for token_id in [*self._tokenizer.encode(text), self._end]:
            bits = np.zeros((1, self._num_words), np.int32)
            matcher.fill(bits, 0)
            if not int(bits[0, token_id // 32]) >> (token_id % 32) & 1:
                return False
            matcher.accept(token_id)
        return True


@pytest.fixture(scope="module")
def both() -> Checker:
    return Checker()


@pytest.fixture(params=["xgrammar", "guidance"])
def checker(both: Checker, request: pytest.FixtureRequest) -> Checker:
    """Both libraries give the same answers, or one leaves them to the other."""
    both.backend = request.param
    return both


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (Wanted(json=SCHEMA), '{"a": 1}'),
        (Wanted(json=json.dumps(SCHEMA)), '{ "a":1}'),
        (Wanted(json=SCHEMA, disable_additional_properties=False), '{"a": 1, "b": 2}'),
        (Wanted(json_object=True), '{"z": [1, {"q": null}]}'),
        (Wanted(regex="a+b"), "aab"),
        (Wanted(choice=("yes", 'n"o')), 'n"o'),
        (Wanted(grammar='root ::= "x" [0-9]+'), "x12"),
        (
            Wanted(structural_tag={"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}),
            '{"a": 1}',
        ),
    ],
)
def test_answers_after_thinking(checker: Checker, wanted: Wanted, text: str) -> None:
    """Within thinking anything goes; a model that need not think may answer at once."""
    within, before = after_thinking(wanted, Start.THINKING), after_thinking(wanted, Start.TAG)
    assert within is not None
    assert before is not None
    assert checker.allows(within, f'Hm {{"b" </thin> <think>\n</think>\n\n{text}')
    assert checker.allows(before, f"<think>\n\n</think>\n\n{text}")
    assert checker.allows(before, text)
    assert not checker.allows(within, text), "thinking has an end"
    assert not checker.allows(within, f"Hm</think>{text}%")
    assert not checker.allows(before, f"Hm</think>{text}")
    assert after_thinking(wanted, Start.ANSWER) is wanted


def test_older_tags_after_thinking(checker: Checker) -> None:
    older = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}
    wanted = after_thinking(Wanted(structural_tag=older), Start.THINKING)
    assert wanted is not None
    assert checker.allows(wanted, '</think>Hi <f>{"a": 1}</f>')
    assert not checker.allows(wanted, '</think>Hi <f>{"b": 1}</f>')


@pytest.mark.parametrize(
    "wanted",
    [
        Wanted(grammar="start: /a+/", param="structured_outputs"),
        Wanted(json="{", param="structured_outputs"),
        Wanted(structural_tag="5", param="structured_outputs"),
        Wanted(structural_tag="true", param="structured_outputs"),
    ],
)
def test_what_cannot_follow_thinking(wanted: Wanted) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        after_thinking(wanted, Start.TAG)
    assert raised.value.param == "structured_outputs"


@pytest.mark.parametrize("given", [{}, {"type": 5}, {"type": "any_text", "excludes": 5}])
def test_malformed_tags_are_left_to_the_library(given: dict[str, Any]) -> None:
    wanted = after_thinking(Wanted(structural_tag={"format": given}), Start.TAG)
    assert wanted is not None
    assert isinstance(wanted.structural_tag, dict)
    assert wanted.structural_tag["format"]["elements"][-1] == given


@pytest.mark.parametrize("start", [Start.THINKING, Start.TAG])
@pytest.mark.parametrize(
    "wanted", [None, Wanted(json=SCHEMA), text_with_calls("hermes", Functions(FUNCTIONS, ["now"]), "tools")]
)
def test_thinking_of_limited_length(checker: Checker, start: Start, wanted: Wanted | None) -> None:
    opening = "<think>" if start is Start.TAG else ""
    answer = '{"a": 1}'
    some, none = after_thinking(wanted, start, 3), after_thinking(wanted, start, 0)
    assert some is not None
    assert none is not None
    assert checker.allows(some, f"{opening}one two three</think>\n\n{answer}")
    assert checker.allows(some, f"{opening}one</think>{answer}")
    assert not checker.allows(some, f"{opening}one two three four</think>{answer}")
    assert checker.allows(none, f"{opening}</think>{answer}")
    assert not checker.allows(none, f"{opening}one</think>{answer}")
    assert checker.allows(some, answer) == (start is Start.TAG)
    assert after_thinking(wanted, Start.ANSWER, 3) is wanted


def test_an_answer_or_calls(checker: Checker) -> None:
    wanted = answer_or_calls(Wanted(json=SCHEMA), "hermes", Functions(FUNCTIONS), parallel=True)
    assert checker.allows(wanted, '{"a": 1}')
    assert checker.allows(wanted, CALLS % '{"city": "Paris", "days": 3}')
    assert not checker.allows(wanted, CALLS % '{"town": "Paris"}')
    assert not checker.allows(wanted, "Hi")
    one = answer_or_calls(Wanted(json=SCHEMA), "hermes", Functions(FUNCTIONS), parallel=False)
    assert not checker.allows(one, CALLS % '{"city": "Paris"}')
    assert checker.allows(one, CALLS.rpartition("\n<tool_call>\n")[0] % '{"city": "Paris"}')


def test_strict_calls_in_text(checker: Checker) -> None:
    wanted = text_with_calls("hermes", Functions(FUNCTIONS, ["get_weather"]), "tools")
    for text in ("", 'Hi {"a": 1} <tool', "Hm.\n" + CALLS % '{"city": "Paris", "days": 3}'):
        assert checker.allows(wanted, text)
    for arguments in ('{"town": "Paris"}', '{"city": 5}', "{}"):
        assert not checker.allows(wanted, CALLS % arguments)
    lax = text_with_calls("hermes", Functions(FUNCTIONS, ["now"]), "tools")
    assert checker.allows(lax, CALLS % '{"town": {"x": ["Paris"]}}')
    assert not checker.allows(lax, (CALLS % "{}").replace("now", "then"))


def test_strict_calls_of_coders(checker: Checker) -> None:
    wanted = text_with_calls("qwen3_coder", Functions(FUNCTIONS, ["get_weather"]), "tools")
    assert checker.allows(wanted, f"I look.\n{CODER_CALLS}")
    assert not checker.allows(wanted, CODER_CALLS.replace("days", "weeks"))
    assert not checker.allows(wanted, CODER_CALLS.replace("\n3\n", "\nthree\n"))
    thinking = after_thinking(wanted, Start.TAG)
    assert thinking is not None
    assert checker.allows(thinking, f"<think>\nMaybe <tool_call>\n</think>\n\n{CODER_CALLS}")


def test_forced_calls(checker: Checker) -> None:
    """Each function has its own definitions, of whatever names, and references to parts of itself."""
    tree = {
        "type": "object",
        "properties": {
            "p": {"$ref": "#/$defs/P"},
            "q": {"$ref": "#/properties/p"},
            "r": {"$ref": "#"},
            "s": {"$ref": "#/$defs/P/properties/n"},
        },
        "$defs": {"P": {"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}}}, "N": {"type": "integer"}},
        "required": ["p"],
    }
    other = {"properties": {"p": {"$ref": "#/definitions/P"}}, "definitions": {"P": {"type": "string"}}}
    functions = {"now": None, "tree": tree, "other": other}
    wanted = Wanted(json=calls_schema(functions.items(), parallel=True), disable_any_whitespace=True)
    now, text = '{"name": "now", "arguments": {}}', '{"name": "other", "arguments": {"p": "x"}}'
    nested = '{"name": "tree", "arguments": {"p": {"n": 5}, "q": {"n": 1}, "r": {"p": {}}, "s": 2}}'
    for calls in ([now], [nested, text], [text, text, now]):
        assert checker.allows(wanted, f"[{', '.join(calls)}]")
    for wrong in ("", text.replace('"x"', "5"), nested.replace("5", '"x"'), now.replace("now", "then"), "{}"):
        assert not checker.allows(wanted, f"[{wrong}]")
    single = Wanted(json=calls_schema(functions.items(), parallel=False), disable_any_whitespace=True)
    assert checker.allows(single, f"[{now}]")
    assert not checker.allows(single, f"[{now}, {now}]")


def test_arguments() -> None:
    assert arguments_schema(None) == arguments_schema({}) == {"type": "object", "properties": {}}
    assert arguments_schema({"properties": {"a": {}}}) == {"type": "object", "properties": {"a": {}}}
