import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.embedding_models import MINILM, make_cross_encoder
from tokenmill_engine.errors import ContextLengthError, InvalidRequestError
from tokenmill_engine.vocabulary.hf_tokenizer import load_hf_tokenizer
from tokenmill_server.flags.build import build_configuration
from tokenmill_server.flags.command_line import read_flags
from tokenmill_server.processing.input_processor import InputProcessor, Prompt, Truncation
from tokenmill_server.processing.tokenizer import Tokenizer
from tokenmill_server.processing.vectors import VectorInputs, make_vector_inputs

LONG = "word " * 60


class CountingTokenizer(Tokenizer):
    """Remembers how many texts it was given."""

    num_texts = 0

    async def encode_many(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        self.num_texts += len(texts)
        return await super().encode_many(texts, add_special_tokens)


@pytest.fixture(scope="module")
def tokenizer() -> CountingTokenizer:
    return CountingTokenizer(load_hf_tokenizer(MINILM))


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory, tokenizer: CountingTokenizer) -> VectorInputs:
    """Of a model for pairs that takes 128 tokens."""
    folder: Path = make_cross_encoder(tmp_path_factory.mktemp("cross-encoder"))
    engine = build_configuration(read_flags([str(folder), "--device", "cpu"], {})).engine
    made = make_vector_inputs(InputProcessor(tokenizer, None, engine), engine.model)
    assert made is not None
    return made


def encode(vectors: VectorInputs, pairs: list[tuple[str, str]], max_tokens: int | None = None) -> list[Prompt]:
    truncation = None if max_tokens is None else Truncation(max_tokens, "right")
    return asyncio.run(vectors.encode_pairs(pairs, truncation, ("query", "documents")))


def test_each_text_is_tokenized_once(vectors: VectorInputs, tokenizer: CountingTokenizer) -> None:
    documents = ["one", LONG, "two", "one"]
    before = tokenizer.num_texts
    prompts = encode(vectors, [("which one?", document) for document in documents])
    assert tokenizer.num_texts - before == 4
    for prompt, document in zip(prompts, documents, strict=True):
        assert prompt.token_ids[: prompt.second_text] == tokenizer.encode("which one?")
        assert prompt.token_ids[prompt.second_text :] == tokenizer.encode(document)[1:]


@pytest.mark.parametrize(("pair", "param"), [((LONG + "x", LONG * 2), "documents"), ((LONG * 2, "x " * 9), "query")])
def test_the_longer_text_of_a_pair_is_blamed(vectors: VectorInputs, pair: tuple[str, str], param: str) -> None:
    with pytest.raises(ContextLengthError) as caught:
        encode(vectors, [("x", "y"), pair])
    assert caught.value.param == param
    assert len(encode(vectors, [pair], -1)[0].token_ids) == 128


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_of_a_pair_something_must_be_left(vectors: VectorInputs, limit: int) -> None:
    with pytest.raises(InvalidRequestError, match="more than 3, the tokens that every pair gets") as caught:
        encode(vectors, [("one", "two")], limit)
    assert caught.value.param == "truncate_prompt_tokens"
    assert len(encode(vectors, [("one", "two")], 4)[0].token_ids) == 4
