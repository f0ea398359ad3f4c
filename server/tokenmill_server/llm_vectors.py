"""Vectors and scores from `LLM`, in plain objects with the attributes that vLLM's have."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_server.llm_inputs import Item, naming_prompt
from tokenmill_server.processing.generation import GenerationRequest, RequestOutput
from tokenmill_server.processing.input_processor import Truncation
from tokenmill_server.processing.vectors import VectorInputs, embedding_of


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


async def vector_requests(
    vectors: VectorInputs, items: Sequence[Item], truncate_prompt_tokens: int | None
) -> list[GenerationRequest]:
    """The request of each text. Raises RequestError, saying of which, for one that is wrong."""
    truncation = _truncation(truncate_prompt_tokens)
    requests = []
    for index, item in enumerate(items):
        with naming_prompt(index):
            if item.sources or item.conversation is not None:
                raise InvalidRequestError("images and videos are not embedded")
            if item.text is not None:
                (prompt,) = await vectors.encode([item.text], truncation, "prompt")
            else:
                prompt = vectors.take_token_ids(item.token_ids, truncation, "prompt")
            requests.append(vectors.build(prompt, label=str(index)))
    return requests


async def pair_requests(
    vectors: VectorInputs, pairs: Sequence[tuple[Item, Item]], truncate_prompt_tokens: int | None
) -> list[GenerationRequest]:
    """The request of each pair. Raises RequestError, saying of which, for one that is wrong."""
    truncation = _truncation(truncate_prompt_tokens)
    requests = []
    for index, (first, second) in enumerate(pairs):
        with naming_prompt(index):
            if first.text is None or second.text is None or first.sources or second.sources:
                raise InvalidRequestError("this model scores pairs of texts; ids and images are not taken")
            (prompt,) = await vectors.encode_pairs([(first.text, second.text)], truncation, ("text_1", "text_2"))
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


def public_score(score: float, *outputs: RequestOutput) -> ScoringRequestOutput:
    """`outputs`: of both texts, or of both together."""
    return ScoringRequestOutput(
        request_id=outputs[-1].label,
        outputs=ScoringOutput(score),
        prompt_token_ids=[token_id for output in outputs for token_id in output.prompt_token_ids],
        num_cached_tokens=sum(output.num_cached_tokens for output in outputs),
    )


def check_pairs(first: Sequence[Item], second: Sequence[Item]) -> None:
    """Raises InvalidRequestError unless there is one `first`, or as many as `second`."""
    if not second or len(first) not in (1, len(second)):
        raise InvalidRequestError(f"{len(first)} texts and {len(second)} make no pairs; give one, or as many")
