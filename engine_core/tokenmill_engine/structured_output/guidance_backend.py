"""Grammars by llguidance (https://github.com/guidance-ai/llguidance): masks are computed from the grammar as the output
grows, within limits of the library's own."""

import json
import re
from dataclasses import astuple
from typing import Any, Final

import llguidance
import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.config.structured_output import MAX_WHITESPACE
from tokenmill_engine.messages import StructuredKind, StructuredSpec
from tokenmill_engine.structured_output import thinking_limit
from tokenmill_engine.structured_output.grammar import Grammar, GrammarError
from tokenmill_engine.structured_output.library_words import report
from tokenmill_engine.structured_output.schemas import refuse_open_escape, with_closed_objects, without_unknown_formats
from tokenmill_engine.structured_output.tag_grammar import lark_of_tag
from tokenmill_engine.structured_output.thinking_limit import Limit, LimitedGrammar, Spelling
from tokenmill_engine.structured_output.xgrammar_backend import is_lark
from tokenmill_engine.vocabulary.vocabulary import Vocabulary

_FORMATS: Final = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""Formats of strings that the library knows; others are notes to the reader."""
_SPECIAL: Final = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")
"""Characters that mean something in a regex."""
_BYTES_PER_CHAR: Final = 64
"""What a grammar takes for each character of its text, roughly; most of it is made while it is used."""
_BASE_BYTES: Final = 1 << 16
_NUM_TRIED: Final = 4
_GIVEN_UP: Final = frozenset(("ParserTooComplex", "LexerTooComplex", "InternalError"))
"""Why the library allows nothing more, beside ends that the grammar has."""


class GuidanceBackend:
    """Compiles, and loads what was compiled, which is the grammar in the library's own terms."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(vocabulary)),
            n_vocab=len(vocabulary.token_bytes),
            eos_token=list(vocabulary.end_token_ids),
        )
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._spelling = Spelling(vocabulary.token_bytes, self._tokenizer.greedy_tokenize)

    def compile(self, spec: StructuredSpec) -> str:
        """Raises GrammarError for what is malformed or not supported."""
        try:
            return json.dumps(
                [self._tried(grammar) if isinstance(grammar, str) else grammar for grammar in _grammars_of(spec)]
            )
        except ValueError as error:
            raise GrammarError(report(str(error))) from error

    def _tried(self, grammar: str) -> str:
        """Raises GrammarError for one that is too much."""
        matcher = self._matcher(grammar)
        # Most of the work is done for the first masks and tokens, and what is too much is seen then.
        for _ in range(_NUM_TRIED):
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            _check(matcher)
            if matcher.is_stopped():
                break
            matcher.consume_token(int(np.unpackbits(bits, bitorder="little").argmax()))
            _check(matcher)
        return grammar

    def load(self, compiled: str) -> Grammar:
        """As `GrammarBackend`."""
        first, *others = json.loads(compiled)
        if not others:
            return self._loaded(first)
        closing, limit = others
        return LimitedGrammar(Limit(*limit), self._loaded(first), self._loaded(closing), self._spelling)

    def _loaded(self, grammar: str) -> "GuidanceGrammar":
        return GuidanceGrammar(self._matcher(grammar), _BASE_BYTES + _BYTES_PER_CHAR * len(grammar))

    def _matcher(self, grammar: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        _check(matcher)
        return matcher


class GuidanceGrammar:
    """A grammar, with an output that stays empty."""

    def __init__(self, matcher: llguidance.LLMatcher, num_bytes: int) -> None:
        self._matcher = matcher
        self.num_bytes = num_bytes

    def matcher(self) -> "GuidanceMatcher":
        """As `Grammar`."""
        return GuidanceMatcher(self._matcher.deep_copy())


class GuidanceMatcher:
    """State of one output."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def fill(self, bits: NDArray[np.int32], row: int) -> None:
        """As `Matcher`."""
        target = bits[row]
        self._matcher.unsafe_compute_mask_ptr(target.ctypes.data, target.nbytes)
        _check(self._matcher)

    def accept(self, token_id: int) -> None:
        """As `Matcher`."""
        if not self._matcher.consume_token(token_id):
            raise GrammarError(report(self._matcher.get_error()))

    def forced(self) -> list[int]:
        """As `Matcher`."""
        forced = self._matcher.compute_ff_tokens()
        if not forced:
            _check(self._matcher)
        return forced


class _Tokens:
    """A vocabulary as the library wants to see it."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.end_token_ids[0]
        self.tokens = vocabulary.token_bytes
        self.special_token_ids = sorted(
            {*vocabulary.special_token_ids, *vocabulary.end_token_ids} & set(range(len(vocabulary.token_bytes)))
        )
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def _grammars_of(spec: StructuredSpec) -> list[Any]:
    """The grammar; or one of an output that thinks, one of its end, and the limit between them."""
    if spec.kind is not StructuredKind.STRUCTURAL_TAG:
        return [_grammar_of(spec)]
    tag, layout = json.loads(spec.text), _Layout(spec)
    limited = thinking_limit.split(tag)
    if limited is None:
        return [lark_of_tag(tag, layout)]
    limit, *tags = limited
    return [*(lark_of_tag(each, layout) for each in tags), astuple(limit)]


class _Layout:
    """As `tag_grammar.Layout`."""

    def __init__(self, spec: StructuredSpec) -> None:
        self.has_others = spec.additional_properties
        self._spec = spec

    def __call__(self, part: dict[str, Any]) -> str:
        most = part.get("max_whitespace_cnt")
        layout = _layout(self._spec, most if type(most) is int and most >= 0 else None)
        if part.get("whitespace_pattern") is not None:
            layout = _layout(self._spec, 0) | {"whitespace_pattern": part["whitespace_pattern"]}
        layout |= {"lenient": part.get("lenient") is True}
        others = part.get("additional_properties")
        schema = _prepared(part.get("json_schema"), self.has_others if others is None else others)
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise GrammarError("the schema of a structural tag must be an object or true")
        return json.dumps({**schema, "x-guidance": layout})


def _prepared(schema: Any, has_others: object) -> Any:
    schema = without_unknown_formats(schema, _FORMATS)
    return schema if has_others else with_closed_objects(schema)


def _grammar_of(spec: StructuredSpec) -> str:
    matcher = llguidance.LLMatcher
    match spec.kind:
        case StructuredKind.JSON:
            schema = _prepared(json.loads(spec.text), spec.additional_properties)
            return matcher.grammar_from_json_schema(json.dumps(schema), overrides=_layout(spec))
        case StructuredKind.JSON_OBJECT:
            return matcher.grammar_from_json_schema('{"type": "object"}', overrides=_layout(spec))
        case StructuredKind.REGEX:
            refuse_open_escape(spec.text)
            # As in JSON schemas, where \d and \w are of ASCII.
            return matcher.grammar_from_lark(f"start: /{llguidance.regex_to_lark(spec.text, 'dw')}/")
        case StructuredKind.CHOICE:
            # As alternatives of a grammar thousands of them would be too many.
            choices = "|".join(_SPECIAL.sub(r"\\\g<0>", choice) for choice in json.loads(spec.text))
            return matcher.grammar_from_lark(f"start: /{llguidance.regex_to_lark(choices, '')}/")
        case StructuredKind.GRAMMAR:
            return matcher.grammar_from_lark(spec.text if is_lark(spec.text) else _lark_of(spec.text))
        case StructuredKind.STRUCTURAL_TAG:
            raise AssertionError(spec.kind)


def _lark_of(ebnf: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        lark: str = any_to_lark(ebnf)
    except Exception as error:
        raise GrammarError(f"the grammar is not understood: {report(str(error))}") from error
    return lark


def _layout(spec: StructuredSpec, max_whitespace: int | None = None) -> Any:
    layout: dict[str, Any] = {"coerce_one_of": True, "lenient": False, "whitespace_flexible": False}
    if spec.whitespace_pattern is not None:
        return layout | {"whitespace_pattern": spec.whitespace_pattern}
    if spec.any_whitespace or max_whitespace is not None:
        most = MAX_WHITESPACE if max_whitespace is None else min(max_whitespace, MAX_WHITESPACE)
        return layout | {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{0,{most}}}"}
    return layout | {"item_separator": ", ", "key_separator": ": "}


def _check(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(report(matcher.get_error()))
    if matcher.stop_reason() in _GIVEN_UP:
        raise GrammarError(f"it is too complex: {report(matcher.get_error())}")
