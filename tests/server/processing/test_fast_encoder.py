"""The fast library and `tokenizers` give the same ids, or the fast one is left out."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.support.tiny_models import tokenizer_json
from tokenmill_engine.config.model_files import embedded_model_path
from tokenmill_engine.vocabulary.gguf_tokenizer import load_gguf_tokenizer
from tokenmill_server.processing.fast_encoder import make_fast_encoder
from tokenmill_server.processing.tokenizer import Tokenizer as OurTokenizer

pytestmark = pytest.mark.slow  # vocabularies of real size are read, some several times

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "qwen2": rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{TAIL}",
    "llama3": rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{TAIL}",
}
CASED_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PIECES = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", " ", "   ", "\n", "\r\n\n", "\t", "\u00a0", "\x00"),
    *(
        "word",
        " Word",
        "don't",
        "I'VE",
        "'S",
        "\u2019s",
        "12",
        " 3456",
        "e\u0301",
        "\uac01",
        "\U0001f469\u200d",
        "()->",
    ),
)
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(st.characters(exclude_categories=["Cs"]), max_size=6)))


def embedded(split: str | None = None) -> Tokenizer:
    """The embedded model's vocabulary, cut into words as another family does."""
    backend = load_gguf_tokenizer(str(embedded_model_path()))
    if split is not None:
        parts = [
            pre_tokenizers.Split(Regex(split), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
        backend.pre_tokenizer = pre_tokenizers.Sequence(parts)  # type: ignore[assignment]
        backend.normalizer = normalizers.NFC()  # type: ignore[assignment]
    return backend


@pytest.fixture(scope="module", params=["smollm", "tiny", *SPLITS])
def backend(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "tiny":
        return Tokenizer.from_str(tokenizer_json())
    return embedded(SPLITS.get(request.param))


@pytest.fixture(scope="module")
def fast(backend: Tokenizer) -> OurTokenizer:
    assert make_fast_encoder(backend) is not None
    return OurTokenizer(backend)


@given(pieces=TEXTS)
def test_ids_are_those_of_tokenizers(backend: Tokenizer, fast: OurTokenizer, pieces: list[str]) -> None:
    """Also of bytes that have no token, which the library refuses and `tokenizers` leaves out."""
    text = "".join(pieces)
    for special in (False, True):
        assert fast.encode(text, special) == backend.encode(text, add_special_tokens=special).ids


def test_bytes_without_a_token_leave_the_rest() -> None:
    backend = embedded()
    assert OurTokenizer(backend).encode("a\U00040000b") == backend.encode("a\U00040000b").ids


def test_a_kind_that_the_library_does_not_know_is_left_to_tokenizers() -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    backend.decoder = decoders.Fuse()  # type: ignore[assignment]
    assert make_fast_encoder(backend) is None


def test_where_ids_differ_the_library_is_left_out() -> None:
    """Of this family it misses a contraction behind another whose s is an old one."""
    assert make_fast_encoder(embedded(CASED_SPLIT)) is None


class FailingEncoder:
    """Has no ids for any text."""

    def encode(self, text: str, add_special_tokens: bool) -> None:
        raise RuntimeError(f"the limit of matches is exceeded: {len(text)}, {add_special_tokens}")


def test_a_text_that_the_library_fails_on_is_encoded_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Tokenizer.from_str(tokenizer_json())
    tokenizer = OurTokenizer(backend)
    expected = tokenizer.encode("a text")
    monkeypatch.setattr(tokenizer, "_fast", FailingEncoder())
    assert tokenizer.encode("a text") == expected == backend.encode("a text").ids


def test_truncation_and_padding_of_the_file_are_not_applied() -> None:
    data = json.loads(tokenizer_json())
    data["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    tokenizer = OurTokenizer(Tokenizer.from_str(json.dumps(data)))
    assert len(tokenizer.encode("some words of a longer text")) > 3
