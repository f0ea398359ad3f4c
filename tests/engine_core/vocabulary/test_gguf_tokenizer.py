from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from tokenmill_engine.errors import ConfigError
from tokenmill_engine.vocabulary.gguf_tokenizer import build_gguf_tokenizer
from tokenmill_engine.vocabulary.token_bytes import build_token_bytes
from tokenmill_engine.vocabulary.vocabulary import Vocabulary
from tokenmill_server.processing.tokenizer import Tokenizer

_ALPHABET = "abc"
_PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *_ALPHABET]
_JOINED = ["ab", "bc", "▁a", "abc", "▁ab", "ca", "cab", "▁▁", "aa", "aaa"]


def sentencepiece(**changes: Any) -> dict[str, Any]:
    """A small SentencePiece vocabulary; a later joined piece has a lower score."""
    tokens = [*_PIECES, *_JOINED]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    scores = [0.0] * len(_PIECES) + [-float(index) for index in range(len(_JOINED))]
    metadata = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}
    metadata |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {f"tokenizer.ggml.{key}": value for key, value in {**metadata, **changes}.items() if value is not None}


def byte_level(**changes: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": ["a", "b", "ab", "Ġ", "<bos>", "[user]"],
        "token_type": [1, 1, 1, 1, 3, 4],
        "merges": ["a b"],
        "bos_token_id": 4,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in {**metadata, **changes}.items() if value is not None}


def greedy_merges(text: str) -> list[str]:
    """What SentencePiece does: again and again join the neighbours whose piece has the best score, leftmost first."""
    scores = {piece: -index for index, piece in enumerate(_JOINED)}
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        candidates = [
            (-scores[left + right], index)
            for index, (left, right) in enumerate(pairwise(pieces))
            if left + right in scores
        ]
        if not candidates:
            return pieces
        _, index = min(candidates)
        pieces[index : index + 2] = [pieces[index] + pieces[index + 1]]


@given(st.text(alphabet=_ALPHABET + " ", min_size=1))
def test_sentencepiece_merges_by_score(text: str) -> None:
    backend = build_gguf_tokenizer(sentencepiece(), "test.gguf")
    assert backend.encode(text, add_special_tokens=False).tokens == greedy_merges(text)


def test_sentencepiece_spells_unknown_characters_in_bytes() -> None:
    tokenizer = Tokenizer(build_gguf_tokenizer(sentencepiece(), "test.gguf"))
    ids = tokenizer.encode("é")
    assert ids == [1, 259, 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode(ids) == "é"
    assert b"".join(tokenizer.visible_bytes[token_id] for token_id in ids) == " é".encode()


def test_sentencepiece_without_space_prefix_and_bos() -> None:
    metadata = sentencepiece(add_space_prefix=False, add_bos_token=False)
    assert build_gguf_tokenizer(metadata, "test.gguf").encode("ab c").tokens == ["ab", "▁", "c"]


def test_pieces_of_text_are_written_exactly() -> None:
    """Without the space in front of the first one, and without special tokens."""
    backend = build_gguf_tokenizer(sentencepiece(), "test.gguf")
    written = build_token_bytes(backend)
    special = backend.token_to_id("</s>")
    written[special] = b""
    vocabulary = Vocabulary(written, frozenset({special}), (special,), backend)
    for text in ("ab", " ab", "c ab", "é", "", "ab</s>", "</s>", "a</s> abc<s>"):
        assert b"".join(written[token_id] for token_id in vocabulary.encode(text)) == text.encode()
        assert special not in vocabulary.encode(text)
    assert vocabulary.encode("ab") == [backend.token_to_id("ab")]


def test_what_is_normalized_elsewhere_is_written_exactly() -> None:
    """Of byte-level BPE that composes characters. A byte that no token writes cannot be had."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    vocabulary = Vocabulary(build_token_bytes(backend), frozenset(), (), backend)
    for text in ("e\u0301", "\u212b", "caf\u00e9 e\u0301"):
        assert b"".join(vocabulary.token_bytes[token_id] for token_id in vocabulary.encode(text)) == text.encode()
    assert Vocabulary([b"", *vocabulary.token_bytes[1:]], frozenset(), (), backend).encode("!") == []


def test_sentencepiece_prefixes_each_part_between_special_tokens() -> None:
    backend = build_gguf_tokenizer(sentencepiece(), "test.gguf")
    assert backend.encode("ab</s>ab", add_special_tokens=False).tokens == ["▁ab", "</s>", "▁ab"]


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("llama-bpe", "It's 12345  ok\n\n x", ["It", "'s", " ", "123", "45", " ", " ok", "\n\n", " x"]),
        ("qwen2", "It'S 12  ok!\n", ["It", "'S", " ", "1", "2", " ", " ok", "!\n"]),
        ("smollm", "a  12 b", ["a", "  ", "1", "2", " b"]),
        ("gpt-2", "a  12 b", ["a", " ", " 12", " b"]),
        ("tekken", "helloWorld 12", ["hello", "World", " ", "1", "2"]),
        ("gpt-4o", "it's 1234/\n", ["it's", " ", "123", "4", "/\n"]),
        ("default", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
    ],
)
def test_pre_tokenizers_cut_as_the_original_models_do(pre: str, text: str, words: list[str]) -> None:
    backend = build_gguf_tokenizer(byte_level(pre=pre), "test.gguf")
    assert backend.pre_tokenizer is not None
    cut = [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert cut == words


def test_qwen2_composes_characters() -> None:
    assert build_gguf_tokenizer(byte_level(pre="qwen2"), "t").normalizer.normalize_str("e\u0301") == "é"


def test_bos_follows_the_file_then_the_family() -> None:
    assert build_gguf_tokenizer(byte_level(), "t").encode("ab").ids == [4, 2]
    assert build_gguf_tokenizer(byte_level(add_bos_token=False), "t").encode("ab").ids == [2]
    assert build_gguf_tokenizer(byte_level(pre="qwen2"), "t").encode("ab").ids == [2]
    assert build_gguf_tokenizer(byte_level(pre="qwen2", add_bos_token=True), "t").encode("ab").ids == [4, 2]


def test_user_defined_tokens_are_found_but_not_special() -> None:
    tokenizer = Tokenizer(build_gguf_tokenizer(byte_level(add_bos_token=False), "t"))
    assert tokenizer.encode("ab[user]a") == [2, 5, 0]
    assert tokenizer.decode([2, 5, 4]) == "ab[user]"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (byte_level(pre="somethingnew"), "pre-tokenizer 'somethingnew' is not supported"),
        (byte_level(model="rwkv"), "kind 'rwkv' is not supported"),
        (byte_level(merges=None), "no metadata key 'tokenizer.ggml.merges'"),
        (byte_level(merges=["a zz"]), "merges do not fit"),
        (byte_level(tokens=None), "no metadata key 'tokenizer.ggml.tokens'"),
        (byte_level(token_type=[1]), "token types"),
        (byte_level(bos_token_id=77), "outside its vocabulary"),
        (sentencepiece(scores=[0.0]), "token scores"),
    ],
)
def test_what_cannot_be_reproduced_is_refused(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_gguf_tokenizer(metadata, "test.gguf")
