"""Grammars by xgrammar (https://github.com/mlc-ai/xgrammar): masks are looked up in tables that are made beforehand."""

import json
import random
import re
import time
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.config.structured_output import MAX_WHITESPACE
from tokenmill_engine.messages import StructuredKind, StructuredSpec
from tokenmill_engine.structured_output.grammar import GrammarError
from tokenmill_engine.structured_output.schemas import refuse_keywords, tag_for_xgrammar
from tokenmill_engine.structured_output.xgrammar_import import import_xgrammar
from tokenmill_engine.vocabulary.vocabulary import Vocabulary

_NUM_TRIED: Final = 48
_MAX_TOKEN_S: Final = 0.05
"""Processor time for the mask of one token, which all other requests of a step wait for. Ordinary grammars take less
than a thousandth of a second; ambiguous ones take longer with every token."""
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
        self._try(XgrammarGrammar(self._library, compiled))
        serialized: str = compiled.serialize_json()
        return serialized

    def load(self, compiled: str) -> "XgrammarGrammar":
        """As `GrammarBackend`."""
        return XgrammarGrammar(self._library, self._library.CompiledGrammar.deserialize_json(compiled, self._tokens))

    def _try(self, grammar: "XgrammarGrammar") -> None:
        """Raises GrammarError if an output soon takes too long: better than when others wait for it."""
        matcher, draw = grammar.matcher(), random.Random(0)
        bits = np.zeros((1, -(-self._tokens.vocab_size // 32)), np.int32)
        ends = np.array(self._tokens.stop_token_ids)
        for _ in range(_NUM_TRIED):
            matcher.fill(bits, 0)
            allowed = np.unpackbits(bits[0].view(np.uint8), bitorder="little", count=self._tokens.vocab_size)
            allowed[ends] = 0
            token_ids = np.flatnonzero(allowed)
            if not len(token_ids):
                return
            matcher.accept(int(token_ids[draw.randrange(len(token_ids))]))


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
        began = time.thread_time()
        self._matcher.fill_next_token_bitmask(bits, row)
        _check_time(began)

    def accept(self, token_id: int) -> None:
        """As `Matcher`."""
        began = time.thread_time()
        if not self._matcher.accept_token(token_id):
            raise GrammarError(f"token {token_id} may not follow")
        _check_time(began)

    def forced(self) -> list[int]:
        """As `Matcher`. The library can tell, but has no limit: it looks for ever at what never ends."""
        return []


def _check_time(began: float) -> None:
    """Raises GrammarError if this thread has worked too long since `began`: the library has no limits of its own."""
    if time.thread_time() - began > _MAX_TOKEN_S:
        raise GrammarError("it is too ambiguous: what may follow takes too long to find out")


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
            return compiler.compile_structural_tag(json.dumps(tag_for_xgrammar(json.loads(spec.text))))
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
