"""Of long texts only an end is tokenized, and its tokens are those of the whole."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.embedding_models import MINILM
from tokenmill_engine.config.model_files import embedded_model_path
from tokenmill_server.processing.excerpts import Side, excerpt, may_be_cut
from tokenmill_server.processing.tokenizer import Tokenizer, load_tokenizer

words = st.sampled_from(
    [
        "mill",
        " ",
        "  ",
        "\n",
        "\n \n",
        "a",
        "grain,",
        "Mühle",
        "水車",
        "e\u0301",
        "don't",
        "<|im_end|>",
        "1234567",
        "x" * 120,
    ]
)
texts = st.lists(words, max_size=30).flatmap(lambda some: st.integers(1, 200).map(lambda times: "".join(some) * times))


@cache
def tokenizer(name: str) -> Tokenizer:
    return load_tokenizer(str(MINILM if name == "wordpiece" else embedded_model_path()))


@given(text=texts, num_tokens=st.integers(0, 40), side=st.sampled_from(["left", "right"]))
@pytest.mark.parametrize("name", ["wordpiece", "bpe"])
def test_an_excerpt_has_the_tokens_that_count(name: str, text: str, num_tokens: int, side: Side) -> None:
    encoder = tokenizer(name)
    whole = encoder.encode(text, add_special_tokens=False)
    part = encoder.encode(excerpt(encoder, text, num_tokens, side), add_special_tokens=False)
    first = side == "right"
    assert (part[:num_tokens] if first else part[len(part) - num_tokens :]) == (
        whole[:num_tokens] if first else whole[max(0, len(whole) - num_tokens) :]
    ) or len(whole) < num_tokens
    assert min(len(part), num_tokens + 1) == min(len(whole), num_tokens + 1)


class Counting:
    """Splits at spaces, and knows how much it was given."""

    def __init__(self) -> None:
        self.num_chars = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.num_chars += len(text)
        return [len(word) for word in text.split()]


@pytest.mark.parametrize("side", ["left", "right"])
def test_little_of_a_long_text_is_looked_at(side: Side) -> None:
    encoder, text = Counting(), "grain " * 1_000_000
    part = excerpt(encoder, text, 256, side)
    assert len(encoder.encode(part)) > 256
    assert len(part) < encoder.num_chars < 20_000


def test_where_there_are_few_words_more_is_looked_at_and_all_at_last() -> None:
    encoder = Counting()
    assert len(excerpt(encoder, (" " * 400 + "grain") * 1000, 100, "right").split()) > 100
    blank = " " * 1_000_000
    assert excerpt(encoder, blank, 100, "right") is blank


def test_short_texts_are_left_alone() -> None:
    assert not may_be_cut("grain " * 40, 40)
    assert may_be_cut("grain " * 400, 40)
