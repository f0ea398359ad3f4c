"""Grammars in tests: a vocabulary of single bytes, and outputs that are drawn from what a grammar allows."""

import json
import random
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from tokenmill_engine.messages import StructuredKind, StructuredSpec
from tokenmill_engine.structured_output.backends import CompilingBackend
from tokenmill_engine.structured_output.grammar import Grammar, GrammarError
from tokenmill_engine.vocabulary.vocabulary import Vocabulary

END = 256
VOCAB_SIZE = 260
"""Ids from 257 on write nothing."""


def _byte_backend() -> Backend:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


class _Bytes(Vocabulary):
    """The id of a byte is its value."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


BYTES = _Bytes([bytes([byte]) for byte in range(256)] + [b""] * 4, frozenset({END}), (END,), _byte_backend())


def spec(kind: str, value: Any, **options: Any) -> StructuredSpec:
    text = value if kind in ("regex", "grammar") else json.dumps(value)
    return StructuredSpec(StructuredKind(kind), text, **options)


def compiled(backend: CompilingBackend, wanted: StructuredSpec) -> Grammar:
    return backend.load(backend.compile(wanted))


def allows(grammar: Grammar, text: str) -> bool:
    """Whether `text` is a whole output: each byte is in the mask, and the end is after the last."""
    matcher = grammar.matcher()
    for token_id in [*text.encode(), END]:
        if not allowed_tokens(matcher)[token_id]:
            return False
        matcher.accept(token_id)
    return True


def allowed_tokens(matcher: Any) -> np.ndarray:
    """bool [VOCAB_SIZE]"""
    bits = np.zeros((2, -(-VOCAB_SIZE // 32)), np.int32)
    matcher.fill(bits, 1)
    assert not bits[0].any()
    return np.unpackbits(bits[1].view(np.uint8), bitorder="little", count=VOCAB_SIZE).astype(np.bool_)


def random_output(grammar: Grammar, chance: random.Random, max_bytes: int = 400) -> str | None:
    """A random output that the grammar allows, which ends as soon as it may, mostly; None if it gets too long."""
    matcher = grammar.matcher()
    output = bytearray()
    while len(output) < max_bytes:
        allowed = np.flatnonzero(allowed_tokens(matcher)).tolist()
        assert allowed, bytes(output)
        # Mostly few kinds of characters, or strings would be noise that hardly ever ends.
        likely = [token for token in allowed if token == END or chr(token) in '"}],:{[0123ab-.'] or allowed
        unusual = [token for token in allowed if token < 0x20 or chr(token) in '"\\/\x7f\xc3\xf0'] or allowed
        token = chance.choice(unusual if chance.random() < 0.15 else likely)
        if END in allowed and chance.random() < 0.8:
            token = END
        matcher.accept(token)
        if token == END:
            return output.decode()
        output.append(token)
    return None


def refusal(backend: CompilingBackend, wanted: StructuredSpec) -> str | None:
    """Why it is not compiled."""
    try:
        backend.compile(wanted)
    except GrammarError as error:
        return error.message
    return None
