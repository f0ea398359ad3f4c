"""A request inside an engine core: what was asked, and how far it has come.

Token counts and generated tokens of a running request live in the scheduler's slot table; here is what does not
change from step to step. Knows nothing of blocks or slots' contents.
"""

import math
import random
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.block_hash import BlockHash, CacheKey, media_spans
from tokenmill_engine.config.media import MediaConfig
from tokenmill_engine.errors import ContextLengthError, InvalidRequestError
from tokenmill_engine.ipc.ids import client_of
from tokenmill_engine.media_items import check_media
from tokenmill_engine.messages import AddRequest, FinishReason, MediaItem, SamplingParams
from tokenmill_engine.mrope import longest_with

MAX_BAD_WORD_TOKENS = 4096
"""Of one request, over all words: each is compared with the output in every step of the whole batch."""


class RequestState(Enum):
    """Where a request is. Why it finished is `Request.finish_reason`."""

    WAITING = auto()
    RUNNING = auto()
    """Holds a slot and blocks."""
    PREEMPTED = auto()
    """Waits again, without blocks; what it generated is kept."""
    FINISHED = auto()


_TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.RUNNING, RequestState.FINISHED}),
    RequestState.RUNNING: frozenset({RequestState.PREEMPTED, RequestState.FINISHED}),
    RequestState.PREEMPTED: frozenset({RequestState.RUNNING, RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}


class IllegalTransitionError(Exception):
    """A bug in the engine: the request cannot go from its state to that one."""


def _no_tokens() -> NDArray[np.int32]:
    return np.empty(0, dtype=np.int32)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """One sequence. `sampling` is resolved: `seed` and `max_tokens` are numbers, the request cannot outgrow the pool.

    `slot` is -1 unless running. Times are of the monotonic clock, in seconds; 0 until they happen.
    """

    request_id: int
    label: str
    prompt_token_ids: NDArray[np.int32]
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    """Every id that ends the request, once each."""
    cache_key: CacheKey
    arrival_time: float
    """When the front end saw it; orders requests of equal priority."""
    priority: int = 0
    media: tuple[MediaItem, ...] = ()
    """Images of the prompt, ascending by offset."""
    second_text: int = 0
    """As in `AddRequest`."""
    makes_vector: bool = False
    """Nothing is generated: it ends with the step that completes its prompt, and is one vector."""
    queued_time: float = 0.0
    block_hashes: list[BlockHash] = field(default_factory=list)
    """Names of the leading full blocks, as far as they were needed yet."""
    slot: int = -1
    saved_output: NDArray[np.int32] = field(default_factory=_no_tokens)
    """Tokens generated before the last preemption; up to date only while PREEMPTED."""
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at the first admission."""
    num_prompt_logprobs: int = 0
    """Prompt positions whose log-probabilities were sent."""
    first_scheduled_time: float = 0.0
    first_token_time: float = 0.0
    finish_reason: FinishReason | None = None
    own_stop_ids: frozenset[int] = field(init=False)
    """`sampling.stop_token_ids`, looked up for every token."""
    _state: RequestState = RequestState.WAITING

    def __post_init__(self) -> None:
        self.own_stop_ids = frozenset(self.sampling.stop_token_ids)

    @property
    def state(self) -> RequestState:
        return self._state

    @property
    def client(self) -> int:
        """The API server that owns the request."""
        return client_of(self.request_id)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def media_end(self) -> int:
        """Position behind the last placeholder; 0 without media."""
        return self.media[-1].offset + self.media[-1].num_tokens if self.media else 0

    @property
    def num_known_tokens(self) -> int:
        """Prompt tokens, and those generated before the last preemption."""
        return len(self.prompt_token_ids) + len(self.saved_output)

    @property
    def max_tokens(self) -> int:
        """Most tokens it may generate."""
        return self.sampling.max_tokens or 0

    @property
    def may_read_cache(self) -> bool:
        """Prompt log-probabilities need every prompt position computed."""
        return self.sampling.prompt_logprobs is None or self.num_prompt_logprobs >= self.num_prompt_tokens - 1

    def transition(self, state: RequestState, reason: FinishReason | None = None) -> None:
        """Change the state; `reason` goes with FINISHED and with nothing else.

        Raises:
            IllegalTransitionError: there is no way from here to there.
        """
        if state not in _TRANSITIONS[self._state] or (reason is None) != (state is not RequestState.FINISHED):
            raise IllegalTransitionError(f"request {self.request_id}: {self._state.name} -> {state.name} ({reason})")
        self._state = state
        self.finish_reason = reason


@dataclass(slots=True, frozen=True)
class RequestLimits:
    """What this engine can do for a request."""

    max_model_len: int
    """Longest prompt + output, already cut to what the pool holds."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    media: MediaConfig | None = None
    """None: the model reads text only."""
    max_item_tokens: int = 0
    """Placeholders of the largest image."""
    num_positions: int = 0
    """As in `ModelConfig`; for a model of text alone without a meaning."""
    makes_vectors: bool = False
    """The model generates no text."""


def build_request(message: AddRequest, limits: RequestLimits, seeds: random.Random) -> Request:
    """Resolve a message into a request; `seeds` gives one to a request that has none.

    The front end has checked all of this with better messages. What is checked again here would otherwise fail on
    the device, and take the whole batch with it.

    Raises:
        ContextLengthError: the prompt leaves no room for a token, or its videos leave no position for one.
        InvalidRequestError: it is empty, a token id or number is out of range, a list is absurdly long, or its media
            are not what the model takes.
    """
    prompt = np.frombuffer(message.prompt_token_ids, dtype="<i4")
    num_prompt = len(prompt)
    sampling = message.sampling
    if limits.makes_vectors:
        sampling = msgspec.structs.replace(sampling, max_tokens=0)
    if num_prompt == 0:
        raise InvalidRequestError("the prompt has no tokens", param="prompt")
    room, needed = limits.max_model_len - num_prompt, min(1, 1 if sampling.max_tokens is None else sampling.max_tokens)
    if room < needed:
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens; this engine holds {limits.max_model_len} including the output",
            param="prompt",
        )
    if not 0 <= message.second_text <= num_prompt:
        raise InvalidRequestError("the second text begins outside of the prompt", param="prompt")
    _check_sampling(sampling, limits.vocab_size)
    _check_vocabulary("prompt", prompt, limits.vocab_size)
    check_media(message.media, prompt, limits.media, limits.max_item_tokens)
    if limits.media is not None:
        room = min(room, longest_with(message.media, limits.media, limits.num_positions) - num_prompt)
        if room < needed:
            raise ContextLengthError(f"the videos last longer than the {limits.num_positions} positions of this model")
    max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    bad_words = _possible_bad_words(sampling.bad_words_token_ids, max_tokens)
    stop_token_ids = tuple(dict.fromkeys(sampling.stop_token_ids))
    seed = seeds.getrandbits(63) if sampling.seed is None else sampling.seed
    end_tokens = () if sampling.ignore_eos else limits.eos_token_ids
    return Request(
        request_id=message.request_id,
        label=message.label,
        prompt_token_ids=prompt,
        sampling=msgspec.structs.replace(
            sampling, max_tokens=max_tokens, seed=seed, stop_token_ids=stop_token_ids, bad_words_token_ids=bad_words
        ),
        stop_token_ids=tuple(dict.fromkeys((*end_tokens, *stop_token_ids))),
        cache_key=CacheKey(cache_salt=message.cache_salt, media=media_spans(message.media)),
        arrival_time=message.arrival_time,
        priority=message.priority,
        media=message.media,
        second_text=message.second_text,
        makes_vector=limits.makes_vectors,
    )


def _possible_bad_words(words: tuple[tuple[int, ...], ...], max_tokens: int) -> tuple[tuple[int, ...], ...]:
    """The words that an output of `max_tokens` tokens can hold, once each.

    Raises:
        InvalidRequestError: they are more than MAX_BAD_WORD_TOKENS tokens.
    """
    possible = tuple(dict.fromkeys(word for word in words if 0 < len(word) <= max_tokens))
    num_tokens = sum(map(len, possible))
    if num_tokens > MAX_BAD_WORD_TOKENS:
        raise InvalidRequestError(
            f"bad_words are {num_tokens} tokens; at most {MAX_BAD_WORD_TOKENS} are possible", param="bad_words"
        )
    return possible


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    for name in ("max_tokens", "min_tokens", "logprobs", "prompt_logprobs"):
        value = getattr(sampling, name)
        if value is not None and value < 0:
            raise InvalidRequestError(f"{name} is {value}; it cannot be negative", param=name)
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(sampling, name) or 0) > vocab_size:
            raise InvalidRequestError(f"{name} is {getattr(sampling, name)}; there are {vocab_size} tokens", param=name)
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        if not math.isfinite(getattr(sampling, name)):
            raise InvalidRequestError(f"{name} is not a finite number", param=name)
    bias = sampling.logit_bias or {}
    if not all(map(math.isfinite, bias.values())):
        raise InvalidRequestError("logit_bias holds a value that is not a finite number", param="logit_bias")
    for name, listed in (
        ("stop_token_ids", sampling.stop_token_ids),
        ("allowed_token_ids", sampling.allowed_token_ids or ()),
    ):
        if len(listed) > vocab_size:
            raise InvalidRequestError(f"{name} has {len(listed)} entries; there are {vocab_size} tokens", param=name)
    _check_vocabulary("logit_bias", tuple(bias), vocab_size)
    _check_vocabulary("stop_token_ids", sampling.stop_token_ids, vocab_size)
    _check_vocabulary("allowed_token_ids", sampling.allowed_token_ids or (), vocab_size)
    _check_vocabulary("logprob_token_ids", sampling.logprob_token_ids, vocab_size)
    for word in sampling.bad_words_token_ids:
        _check_vocabulary("bad_words", word, vocab_size)


def _check_vocabulary(name: str, token_ids: tuple[int, ...] | NDArray[np.int32], vocab_size: int) -> None:
    if len(token_ids) == 0:
        return
    lowest, highest = int(np.min(token_ids)), int(np.max(token_ids))
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise InvalidRequestError(f"{name}: token id {wrong} is not in 0..{vocab_size - 1}", param=name)
