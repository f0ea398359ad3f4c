import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from tests.support.embedding_models import MINILM
from tokenmill_engine.errors import ConfigError
from tokenmill_server.processing.text_pairs import cut_pair
from tokenmill_server.processing.tokenizer import Tokenizer

SPECIAL = {"[CLS]": 0, "[SEP]": 1}
FRAMES = {
    "as BERT": "[CLS] $A [SEP] $B:1 [SEP]:1",
    "as RoBERTa": "[CLS] $A [SEP] [SEP] $B [SEP]",
    "marked before the second text": "$A [SEP]:1 $B:1",
    "nothing around": "$A $B",
}


def backend(frame: str | None) -> Backend:
    """Words `a` to `h`."""
    words = {word: index for index, word in enumerate([*SPECIAL, *"abcdefgh"])}
    made = Backend(models.WordLevel(words, unk_token="[SEP]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    if frame is not None:
        made.post_processor = processors.TemplateProcessing(
            single="$A", pair=frame, special_tokens=list(SPECIAL.items())
        )
    return made


@pytest.mark.parametrize("name", FRAMES)
@pytest.mark.parametrize(("first", "second"), [("a b c", "d e"), ("a", "b c d e f g h"), ("a b", "c")])
def test_pairs_are_joined_as_the_tokenizer_does(name: str, first: str, second: str) -> None:
    made = backend(FRAMES[name])
    expected = made.encode(first, second)
    tokenizer = Tokenizer(made)
    frame = tokenizer.pair_frame()
    parts = [tokenizer.encode(text, add_special_tokens=False) for text in (first, second)]
    assert frame.join(*parts) == (expected.ids, [*expected.type_ids, 1].index(1))
    assert frame.num_tokens == made.num_special_tokens_to_add(is_pair=True)


def test_texts_without_tokens_leave_the_frame() -> None:
    frame = Tokenizer(backend(FRAMES["as BERT"])).pair_frame()
    assert frame.join([], []) == ([0, 1, 1], 2)


@pytest.mark.parametrize("frame", ["[CLS] $B [SEP] $A", "$A:1 [SEP]:1 $B"])
def test_other_orders_are_refused(frame: str) -> None:
    with pytest.raises(ConfigError, match="pairs of texts in a way that is not supported"):
        Tokenizer(backend(frame)).pair_frame()


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 40))
def test_the_longer_text_is_cut_as_the_library_does(num_first: int, num_second: int, room: int) -> None:
    first, second = list(range(num_first)), list(range(100, 100 + num_second))
    kept = cut_pair(first, second, room)
    assert kept == (first[: len(kept[0])], second[: len(kept[1])])
    assert sum(map(len, kept)) == min(room, num_first + num_second)
    for text, rest, other in zip((first, second), kept, reversed(kept), strict=True):
        assert len(rest) == len(text) or len(rest) >= len(other) or abs(len(rest) - len(other)) <= 1


def test_a_real_tokenizer() -> None:
    made = Backend.from_file(str(MINILM / "tokenizer.json"))
    made.no_padding()
    made.no_truncation()
    expected = made.encode("What is the capital of France?", "Zürich, no: Paris.")
    tokenizer = Tokenizer(made)
    parts = [
        tokenizer.encode(text, add_special_tokens=False)
        for text in ("What is the capital of France?", "Zürich, no: Paris.")
    ]
    assert tokenizer.pair_frame().join(*parts) == (expected.ids, expected.type_ids.index(1))
