"""What goes into the generation of one prompt and what comes out: the vocabulary that HTTP routes and `LLM` share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill_engine.messages import FinishReason, MediaItem, SamplingParams
from tokenmill_server.processing.media_supply import MediaSupply


@dataclass(slots=True, frozen=True)
class GenerationRequest:
    """One prompt, checked and ready for the engine. `InputProcessor` makes it."""

    label: str
    """The client's own id, for logs only."""
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    """`n` choices; `max_tokens` is a number and fits; `bad_words_token_ids` is filled in."""
    arrival_time: float
    """Seconds of `time.monotonic`, before tokenization."""
    prompt: str | None = None
    """The prompt's text where it was given as text."""
    priority: int = 0
    cache_salt: str | None = None
    deadline: float | None = None
    """Seconds of `time.monotonic`: what is not complete by then is given up."""
    media: tuple[MediaItem, ...] = ()
    """Images, and where they stand in the prompt; without tensors if there is a supply."""
    media_supply: MediaSupply | None = None
    second_text: int = 0
    """As in `AddRequest`."""


@dataclass(slots=True)
class TokenLogprob:
    """Log-probability of one token, from the raw logits."""

    token_id: int
    logprob: float
    """Finite: what is not possible at all has the floor -9999."""
    rank: int
    """1 for the most likely token."""
    top: list[tuple[int, float]]
    """(token id, log-probability) of the most likely tokens, best first."""
    text: str = ""
    """What this token added to the text: nothing while a character is unfinished. Joined they are the text."""


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` choices."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or the entry of `stop_token_ids` that ended it; None for the model's own end token."""
    logprobs: list[TokenLogprob] | None = None


@dataclass(slots=True)
class RequestOutput:
    """Everything that came of one prompt."""

    label: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One per prompt token; the first has none."""
    timings: dict[str, Any] | None = None
    """As `timings_of` has it."""
    vector: bytes | None = None
    """What a model that generates no text made of the prompt: as in `messages.PooledVector`."""
