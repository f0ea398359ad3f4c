"""Prompts of `LLM.embed` and `LLM.score`: tokenized many at once, and still each with its own errors."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.embedding_models import MINILM, make_cross_encoder
from tokenmill_engine.errors import ContextLengthError, InvalidRequestError
from tokenmill_engine.vocabulary.hf_tokenizer import load_hf_tokenizer
from tokenmill_server.flags.build import build_configuration
from tokenmill_server.flags.command_line import read_flags
from tokenmill_server.llm_inputs import Item
from tokenmill_server.llm_vectors import pair_requests, vector_requests
from tokenmill_server.multimodal.parts import ImageSource
from tokenmill_server.processing.input_processor import InputProcessor
from tokenmill_server.processing.tokenizer import Tokenizer
from tokenmill_server.processing.vectors import VectorInputs, make_vector_inputs

TEXTS = [f"text {index}" for index in range(1500)]
TOO_LONG = "word " * 600


class CountingTokenizer(Tokenizer):
    """Remembers how often it was called, and with how many texts."""

    num_calls = num_texts = 0

    async def encode_many(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        self.num_calls += 1
        self.num_texts += len(texts)
        return await super().encode_many(texts, add_special_tokens)


@pytest.fixture
def tokenizer() -> CountingTokenizer:
    return CountingTokenizer(load_hf_tokenizer(MINILM))


def inputs_of(folder: Path, tokenizer: Tokenizer) -> VectorInputs:
    engine = build_configuration(read_flags([str(folder), "--device", "cpu"], {})).engine
    made = make_vector_inputs(InputProcessor(tokenizer, None, engine), engine.model)
    assert made is not None
    return made


def test_texts_are_tokenized_many_at_once(tokenizer: CountingTokenizer) -> None:
    vectors = inputs_of(MINILM, tokenizer)
    ids = tokenizer.encode("given as ids")
    items = [*map(Item, TEXTS[:700]), Item(token_ids=ids), *map(Item, TEXTS[700:])]
    requests = asyncio.run(vector_requests(vectors, items, None))
    assert [list(request.prompt_token_ids) for request in requests] == [
        *map(tokenizer.encode, TEXTS[:700]),
        ids,
        *map(tokenizer.encode, TEXTS[700:]),
    ]
    assert [request.label for request in requests] == [str(index) for index in range(1501)]
    assert (tokenizer.num_calls, tokenizer.num_texts) == (2, 1500)


@pytest.mark.parametrize(
    ("wrong", "error", "reason"),
    [
        (Item(TOO_LONG), ContextLengthError, "maximum context length"),
        (Item(token_ids=[10**6]), InvalidRequestError, "token"),
        (Item("x", sources=[ImageSource("http://x/y.png", "auto", "prompt")]), InvalidRequestError, "are not embedded"),
    ],
)
def test_the_text_that_is_wrong_is_named(
    tokenizer: CountingTokenizer, wrong: Item, error: type[Exception], reason: str
) -> None:
    items = [*map(Item, TEXTS[:1200]), wrong, Item(TOO_LONG)]
    with pytest.raises(error, match=f"^prompt 1200: .*{reason}"):
        asyncio.run(vector_requests(inputs_of(MINILM, tokenizer), items, None))


def test_pairs_are_tokenized_many_at_once(tmp_path: Path, tokenizer: CountingTokenizer) -> None:
    """Their query so, too, which comes with each."""
    vectors = inputs_of(make_cross_encoder(tmp_path), tokenizer)
    pairs = [(Item("which one?"), Item(text)) for text in TEXTS]
    requests = asyncio.run(pair_requests(vectors, pairs, None))
    for request, text in zip(requests, TEXTS, strict=True):
        both = [*tokenizer.encode("which one?"), *tokenizer.encode(text)[1:]]
        assert list(request.prompt_token_ids) == both
    assert (tokenizer.num_calls, tokenizer.num_texts) == (4, 1502)
    with pytest.raises(InvalidRequestError, match=r"^prompt 1300: .*ids and images are not taken"):
        asyncio.run(pair_requests(vectors, [*pairs[:1300], (Item("x"), Item(token_ids=[5]))], None))
