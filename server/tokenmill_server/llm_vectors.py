"""Vectors and scores from `LLM`, in plain objects with the attributes that vLLM's have."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.errors import InvalidRequestError, RequestError
from tokenmill_server.llm_inputs import Item, naming_prompt
from tokenmill_server.processing.generation import GenerationRequest, RequestOutput
from tokenmill_server.processing.input_processor import Prompt, Truncation
from tokenmill_server.processing.vectors import VectorInputs, embedding_of

T = TypeVar("T")

_TOKENIZED_AT_A_TIME = 1024
"""Texts of one call of the tokenizer, which nothing interrupts."""


@dataclass(slots=True)
class EmbeddingOutput:
    """A vector."""

    embedding: list[float]


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """What came of one text."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts go together."""

    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """What came of two texts."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    """Of both, one after the other."""
    num_cached_tokens: int
    finished: bool = True


@dataclass(slots=True)
class PoolingOutput:
    """A vector."""

    data: NDArray[np.float32]
    """[num_dimensions]"""


@dataclass(slots=True)
class PoolingRequestOutput:
    """What came of one text, as `LLM.encode` gives it."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


def check_task(pooling_task: str | None) -> None:
    """Raises InvalidRequestError for what `LLM.encode` does not do."""
    if pooling_task != "embed":
        told = "pooling_task must be given" if pooling_task is None else f"pooling_task {pooling_task!r} does not exist"
        raise InvalidRequestError(
            f"{told}: there is 'embed', a vector of each text; pairs of texts are scored by LLM.score", "pooling_task"
        )


async def vector_requests(
    vectors: VectorInputs, items: Sequence[Item], truncate_prompt_tokens: int | None
) -> list[GenerationRequest]:
    """The request of each text. Raises RequestError, saying of which, for one that is wrong."""
    truncation = _truncation(truncate_prompt_tokens)

    async def encode(batch: Sequence[Item]) -> list[Prompt]:
        if any(item.sources or item.conversation is not None for item in batch):
            raise InvalidRequestError("images and videos are not embedded")
        texts = [item.text for item in batch if item.text is not None]
        encoded = iter(await vectors.encode(texts, truncation, "prompt") if texts else ())
        return [
            vectors.take_token_ids(item.token_ids, truncation, "prompt") if item.text is None else next(encoded)
            for item in batch
        ]

    return await _requests(vectors, items, encode)


async def pair_requests(
    vectors: VectorInputs, pairs: Sequence[tuple[Item, Item]], truncate_prompt_tokens: int | None
) -> list[GenerationRequest]:
    """The request of each pair. Raises RequestError, saying of which, for one that is wrong."""
    truncation = _truncation(truncate_prompt_tokens)

    async def encode(batch: Sequence[tuple[Item, Item]]) -> list[Prompt]:
        return await vectors.encode_pairs([_texts_of(pair) for pair in batch], truncation, ("text_1", "text_2"))

    return await _requests(vectors, pairs, encode)


def _texts_of(pair: tuple[Item, Item]) -> tuple[str, str]:
    first, second = pair
    if first.text is None or second.text is None or first.sources or second.sources:
        raise InvalidRequestError("this model scores pairs of texts; ids and images are not taken")
    return first.text, second.text


async def _requests(
    vectors: VectorInputs, items: Sequence[T], encode: Callable[[Sequence[T]], Awaitable[list[Prompt]]]
) -> list[GenerationRequest]:
    """`encode` makes prompts of many at once; if it refuses them, they go to it one by one to find which is wrong."""
    requests: list[GenerationRequest] = []
    for begin in range(0, len(items), _TOKENIZED_AT_A_TIME):
        batch = items[begin : begin + _TOKENIZED_AT_A_TIME]
        try:
            prompts = await encode(batch)
        except RequestError:
            for index, item in enumerate(batch, begin):
                with naming_prompt(index):
                    await encode([item])
            raise
        for index, prompt in enumerate(prompts, begin):
            with naming_prompt(index):
                requests.append(vectors.build(prompt, label=str(index)))
    return requests


def _truncation(max_tokens: int | None) -> Truncation | None:
    return None if max_tokens is None else Truncation(max_tokens, "right")


def public_embedding(output: RequestOutput, normalize: bool, num_dimensions: int) -> EmbeddingRequestOutput:
    return EmbeddingRequestOutput(
        request_id=output.label,
        outputs=EmbeddingOutput(embedding_of(output, normalize, num_dimensions).astype(float).tolist()),
        prompt_token_ids=list(output.prompt_token_ids),
        num_cached_tokens=output.num_cached_tokens,
    )


def pooling_of(output: EmbeddingRequestOutput) -> PoolingRequestOutput:
    """The same as `LLM.encode` gives it."""
    data = PoolingOutput(np.array(output.outputs.embedding, dtype=np.float32))
    return PoolingRequestOutput(output.request_id, data, output.prompt_token_ids, output.num_cached_tokens)


def public_score(score: float, *outputs: RequestOutput) -> ScoringRequestOutput:
    """`outputs`: of both texts, or of both together."""
    return ScoringRequestOutput(
        request_id=outputs[-1].label,
        outputs=ScoringOutput(score),
        prompt_token_ids=[token_id for output in outputs for token_id in output.prompt_token_ids],
        num_cached_tokens=sum(output.num_cached_tokens for output in outputs),
    )
