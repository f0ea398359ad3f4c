"""Grammars by xgrammar (https://github.com/mlc-ai/xgrammar): masks are looked up in tables that are made beforehand."""

import json
import re
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.messages import StructuredKind, StructuredSpec
from tokenmill_engine.structured_output.grammar import GrammarError
from tokenmill_engine.structured_output.schemas import refuse_keywords, with_safe_strings
from tokenmill_engine.structured_output.xgrammar_import import import_xgrammar
from tokenmill_engine.vocabulary.vocabulary import Vocabulary

MAX_WHITESPACE: Final = 32
"""Characters in a row between the parts of JSON: models that have nothing to say would write it for ever."""

_LARK_RULE = re.compile(r"^\s*[?!]?[A-Za-z_][A-Za-z0-9_]*(\.-?[0-9]+)?\s*:(?!:=)", re.MULTILINE)


class XgrammarBackend:
    """Compiles, and loads what was compiled."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._library = import_xgrammar()
        self._tokens = self._library.TokenizerInfo(
            vocabulary.token_bytes,
            self._library.VocabType.RAW,
            vocab_size=len(vocabulary.token_bytes),
            stop_token_ids=list(vocabulary.end_token_ids),
        )

    def compile(self, spec: StructuredSpec) -> str:
        """Raises GrammarError for what is malformed or not supported."""
        compiler = self._library.GrammarCompiler(self._tokens, max_threads=1, cache_enabled=False)
        try:
            compiled = _compile(compiler, spec)
        except (RuntimeError, ValueError, TypeError) as error:
            raise GrammarError(_first_line(error)) from error
        serialized: str = compiled.serialize_json()
        return serialized

    def load(self, compiled: str) -> "XgrammarGrammar":
        """As `GrammarBackend`."""
        return XgrammarGrammar(self._library, self._library.CompiledGrammar.deserialize_json(compiled, self._tokens))


class XgrammarGrammar:
    """Tables of one grammar."""

    def __init__(self, library: Any, compiled: Any) -> None:
        self._library, self._compiled = library, compiled
        self.num_bytes: int = compiled.memory_size_bytes

    def matcher(self) -> "XgrammarMatcher":
        """As `Grammar`."""
        return XgrammarMatcher(self._library.GrammarMatcher(self._compiled))


class XgrammarMatcher:
    """State of one output."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill(self, bits: NDArray[np.int32], row: int) -> None:
        """As `Matcher`."""
        self._matcher.fill_next_token_bitmask(bits, row)

    def accept(self, token_id: int) -> None:
        """As `Matcher`."""
        if not self._matcher.accept_token(token_id):
            raise GrammarError(f"token {token_id} may not follow")


def _compile(compiler: Any, spec: StructuredSpec) -> Any:
    match spec.kind:
        case StructuredKind.JSON:
            if spec.whitespace_pattern is not None:
                raise GrammarError("xgrammar knows no whitespace_pattern")
            refuse_keywords(json.loads(spec.text))
            return compiler.compile_json_schema(spec.text, strict_mode=not spec.additional_properties, **_layout(spec))
        case StructuredKind.JSON_OBJECT:
            return compiler.compile_json_schema('{"type": "object"}', strict_mode=False, **_layout(spec))
        case StructuredKind.REGEX:
            return compiler.compile_regex(spec.text)
        case StructuredKind.CHOICE:
            choices = (json.dumps(choice) for choice in json.loads(spec.text))
            return compiler.compile_grammar(f"root ::= {' | '.join(choices)}")
        case StructuredKind.STRUCTURAL_TAG:
            return compiler.compile_structural_tag(json.dumps(with_safe_strings(json.loads(spec.text))))
        case StructuredKind.GRAMMAR:
            return compiler.compile_lark(spec.text) if is_lark(spec.text) else compiler.compile_grammar(spec.text)


def is_lark(grammar: str) -> bool:
    """Whether a grammar is written in Lark: its rules have a colon, those of EBNF `::=`."""
    return "::=" not in grammar and _LARK_RULE.search(grammar) is not None


def _layout(spec: StructuredSpec) -> dict[str, Any]:
    if spec.any_whitespace:
        return {"any_whitespace": True, "max_whitespace_cnt": MAX_WHITESPACE}
    return {"any_whitespace": False, "separators": (", ", ": ")}


def _first_line(error: Exception) -> str:
    """What the library says, without where in its source it does."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines else type(error).__name__
    return re.sub(r"^\[[0-9:]+\] \S+:\d+: ", "", text)[:300]
