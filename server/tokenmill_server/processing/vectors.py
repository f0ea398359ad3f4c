"""Texts that become vectors: what an engine takes of them, and what becomes of what it gives. Knows no HTTP."""

import math
import time
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.config.engine import ModelConfig
from tokenmill_engine.config.pooling import PoolingConfig
from tokenmill_engine.errors import EngineError, InvalidRequestError
from tokenmill_engine.messages import SamplingParams
from tokenmill_server.processing.generation import GenerationRequest, RequestOutput
from tokenmill_server.processing.input_processor import InputProcessor, Prompt, Truncation
from tokenmill_server.processing.text_pairs import cut_pair
from tokenmill_server.processing.tokenizer import Tokenizer

Vector = NDArray[np.float32]
T = TypeVar("T")

_NOTHING_SAMPLED = SamplingParams(max_tokens=0, temperature=0.0)


class VectorInputs:
    """Prepares the texts of a model that makes vectors. `size`: how many numbers each has."""

    def __init__(self, inputs: InputProcessor, pooling: PoolingConfig, size: int) -> None:
        self._inputs = inputs
        self.pooling = pooling
        self.size = size
        self._frame = _frame(inputs.tokenizer)
        self._pair_frame = inputs.tokenizer.pair_frame() if pooling.scores_pairs else None

    def check_embeds(self, name: str, instead: str) -> None:
        """Raises InvalidRequestError if the model, called `name`, is one for pairs, with what to use `instead`."""
        if self.pooling.scores_pairs:
            message = f"{name} scores pairs of texts and makes no vectors; use {instead}"
            raise InvalidRequestError(message, "model", "unsupported_model")

    def num_dimensions(self, asked: int | None) -> int:
        """Of each vector; None asks for all. Raises InvalidRequestError for more than that, or none."""
        if asked is None:
            return self.size
        if not 1 <= asked <= self.size:
            raise InvalidRequestError(f"dimensions must be between 1 and {self.size}, got {asked}", "dimensions")
        return asked

    async def encode(
        self, texts: Sequence[str], truncation: Truncation | None, param: str, add_special_tokens: bool = True
    ) -> list[Prompt]:
        """Tokenizes texts. What is cut off is text: the tokens that the tokenizer puts around it stay."""
        inputs = self._inputs
        if truncation is None:
            return await inputs.encode_texts(texts, add_special_tokens, None, param)
        parts = await inputs.excerpts(texts, truncation, param)
        batch = await inputs.tokenizer.encode_many(parts, add_special_tokens)
        before, behind = self._frame if add_special_tokens else (0, 0)
        return [
            Prompt(self._cut(token_ids, truncation, before, behind), text, param)
            for text, token_ids in zip(texts, batch, strict=True)
        ]

    async def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], truncation: Truncation | None, params: tuple[str, str]
    ) -> list[Prompt]:
        """Tokenizes pairs of texts, each pair as one prompt; what is cut off is the end of the longer text, or of both.
        `params`: the fields that have the first texts and the second ones."""
        inputs, limit, ends = self._inputs, None, None
        if truncation is not None:
            limit = len(inputs.truncated(range(inputs.max_model_len), truncation))
            ends = Truncation(truncation.max_tokens, "right")
        parts = []
        for texts, param in zip(zip(*pairs, strict=True), params, strict=True):
            distinct = list(dict.fromkeys(texts))  # a query comes with each of its documents
            if truncation is None:
                inputs.check_text_length(max(map(len, distinct)), inputs.max_model_len, param)
            excerpts = await inputs.excerpts(distinct, ends, param)
            batch = await inputs.tokenizer.encode_many(excerpts, add_special_tokens=False)
            ids_of = dict(zip(distinct, batch, strict=True))
            parts.append([ids_of[text] for text in texts])
        return [self._pair(first, second, limit, params) for first, second in zip(*parts, strict=True)]

    def _pair(self, first: Sequence[int], second: Sequence[int], limit: int | None, params: tuple[str, str]) -> Prompt:
        """One prompt of the ids of two texts. Raises InvalidRequestError if it is too long, naming the longer text."""
        frame = self._pair_frame
        if frame is None:
            raise TypeError("the model takes no pairs of texts")
        param = params[0] if len(first) > len(second) else params[1]
        num_tokens = len(first) + len(second) + frame.num_tokens
        if limit is None or num_tokens <= limit:
            self._inputs.check_fits(num_tokens, param)
        else:
            _check_room(limit, frame.num_tokens, "pair")
            first, second = cut_pair(first, second, limit - frame.num_tokens)
        token_ids, begin = frame.join(first, second)
        return Prompt(token_ids, param=param, second_text=begin)

    def take_token_ids(self, token_ids: Sequence[int], truncation: Truncation | None, param: str) -> Prompt:
        """A prompt of ids. Raises InvalidRequestError as `InputProcessor.take_token_ids`."""
        return self._inputs.take_token_ids(token_ids, truncation, param)

    def build(
        self,
        prompt: Prompt,
        *,
        label: str = "",
        arrival_time: float | None = None,
        priority: int = 0,
        deadline: float | None = None,
    ) -> GenerationRequest:
        """A request that the engine cannot refuse. Raises InvalidRequestError naming the field."""
        self._inputs.check_priority(priority)
        if len(prompt.token_ids) == 0:
            raise InvalidRequestError(f"{prompt.param} has a text without tokens", prompt.param)
        self._inputs.check_fits(len(prompt.token_ids), prompt.param)
        return GenerationRequest(
            label=label,
            prompt_token_ids=prompt.token_ids,
            sampling=_NOTHING_SAMPLED,
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            prompt=prompt.text,
            priority=priority,
            deadline=deadline,
            second_text=prompt.second_text,
        )

    def _cut(self, token_ids: Sequence[int], truncation: Truncation, before: int, behind: int) -> Sequence[int]:
        """`before` and `behind`: how many tokens at its ends are no text."""
        end = len(token_ids) - behind
        kept = len(self._inputs.truncated(token_ids, truncation))
        if kept == len(token_ids):
            return token_ids
        _check_room(kept, before + behind, "text")
        num_text = kept - before - behind
        text = token_ids[end - num_text : end] if truncation.side == "left" else token_ids[before : before + num_text]
        return [*token_ids[:before], *text, *token_ids[end:]]


def make_vector_inputs(inputs: InputProcessor, model: ModelConfig) -> VectorInputs | None:
    """None for a model that generates text."""
    return None if model.pooling is None else VectorInputs(inputs, model.pooling, model.architecture.hidden_size)


def vector_of(output: RequestOutput) -> Vector:
    """What the engine made of a prompt. Raises EngineError if it is not there."""
    if output.vector is None:
        raise EngineError("the engine ended a request without its vector")
    return np.frombuffer(output.vector, dtype="<f4")


def embedding_of(output: RequestOutput, normalize: bool, num_dimensions: int | None = None) -> Vector:
    """The first `num_dimensions` of the vector of a prompt, brought to length 1 if it is to be."""
    vector = vector_of(output)[:num_dimensions]
    return vector / max(float(np.linalg.norm(vector)), 1e-12) if normalize else vector


def check_pairs(num_first: int, num_second: int, params: tuple[str, str]) -> None:
    """Raises InvalidRequestError unless `pairs_of` can pair so many texts; `params` are the fields that have them."""
    if not num_second or num_first not in (1, num_second):
        one, two = params
        raise InvalidRequestError(
            f"{one} has {num_first} texts and {two} {num_second}, which makes no pairs; give one {one}, or as many",
            one if num_second else two,
        )


def pairs_of(first: Sequence[T], second: Sequence[T]) -> list[tuple[T, T]]:
    """The only `first`, or that of the same number, with each of `second`."""
    firsts = first if len(first) == len(second) else [first[0]] * len(second)
    return list(zip(firsts, second, strict=True))


def score_of(output: RequestOutput, squash: bool) -> float:
    """What a model for pairs made of one, by a sigmoid between 0 and 1 if it is to be."""
    value = float(vector_of(output)[0])
    return 0.5 * (1.0 + math.tanh(0.5 * value)) if squash else value


def cosines(first: Sequence[RequestOutput], second: Sequence[RequestOutput]) -> list[float]:
    """Of the vectors of two prompts, paired as `pairs_of` does."""
    ours, theirs = (
        np.stack([embedding_of(output, normalize=True) for output in outputs]) for outputs in (first, second)
    )
    scores: list[float] = (ours * theirs).sum(axis=1).astype(np.float64).tolist()
    return scores


def _check_room(num_kept: int, num_around: int, name: str) -> None:
    """Raises InvalidRequestError if nothing is left of a text beside the tokens around it."""
    if num_kept <= num_around:
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be more than {num_around}, the tokens that every {name} gets",
            "truncate_prompt_tokens",
        )


def _frame(tokenizer: Tokenizer) -> tuple[int, int]:
    """How many tokens the tokenizer puts before a text and behind it."""
    framed, bare = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    for before in range(len(framed) - len(bare) + 1):
        if framed[before : before + len(bare)] == bare:
            return before, len(framed) - len(bare) - before
    return 0, 0
