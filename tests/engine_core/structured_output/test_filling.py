"""Masks of several outputs at once are those of each alone."""

import numpy as np
import pytest

from tests.support.grammars import BYTES, VOCAB_SIZE, compiled, spec
from tokenmill_engine.structured_output import filling
from tokenmill_engine.structured_output.filling import MaskFiller
from tokenmill_engine.structured_output.grammar import GrammarError, Matcher
from tokenmill_engine.structured_output.guidance_backend import GuidanceBackend
from tokenmill_engine.structured_output.thinking_limit import Limit, LimitedMatcher, Spelling
from tokenmill_engine.structured_output.xgrammar_backend import XgrammarBackend

NUM_WORDS = -(-VOCAB_SIZE // 32)


@pytest.fixture(params=[1, 2])
def filler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MaskFiller:
    """In one thread and in two."""
    monkeypatch.setattr(filling.os, "sched_getaffinity", lambda _: range(2 * request.param))
    return MaskFiller(computes_here=False)


def matchers(guidance: GuidanceBackend, xgrammar: XgrammarBackend) -> list[Matcher]:
    grammars = [compiled(guidance, spec("regex", f"[{first}-z]{{3}}")) for first in "abcdef"]
    spelling = Spelling(BYTES.token_bytes, BYTES.encode)
    limited = LimitedMatcher(Limit("", "!", 9), grammars[0].matcher(), grammars[1], spelling)
    return [*(grammar.matcher() for grammar in grammars), compiled(xgrammar, spec("regex", "[0-3]")).matcher(), limited]


def test_each_has_its_own(filler: MaskFiller, guidance: GuidanceBackend, xgrammar: XgrammarBackend) -> None:
    expected = np.zeros((8, NUM_WORDS), np.int32)
    for row, matcher in enumerate(matchers(guidance, xgrammar)):
        matcher.fill(expected, row)
    bits = np.zeros((10, NUM_WORDS), np.int32)
    rows = [3, 1, 8, 9, 0, 2, 5, 4]
    assert filler.fill(bits, list(zip(rows, matchers(guidance, xgrammar), strict=True))) == {}
    assert (bits[rows] == expected).all()
    assert not bits[[6, 7]].any()
    assert filler.fill(bits, []) == {}


def test_one_that_fails_is_named(filler: MaskFiller, guidance: GuidanceBackend, xgrammar: XgrammarBackend) -> None:
    some = matchers(guidance, xgrammar)
    with pytest.raises(GrammarError):
        some[2].accept(ord("!"))
    bits = np.zeros((8, NUM_WORDS), np.int32)
    assert filler.fill(bits, list(enumerate(some))).keys() == {2}
    assert all(bits[row].any() for row in range(8) if row != 2)


def test_cores_of_the_model_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling.os, "sched_getaffinity", lambda _: range(64))
    assert (MaskFiller(computes_here=True)._num_threads, MaskFiller(computes_here=False)._num_threads) == (1, 8)
