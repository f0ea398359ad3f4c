"""From what a client sends to what an engine takes: token ids, resolved limits, and refusals at the door.

Shared by the HTTP routes and `LLM`. Knows neither HTTP nor sockets.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.errors import ContextLengthError, InvalidRequestError
from tokenmill_engine.messages import MediaItem, SamplingParams
from tokenmill_server.processing.chat_template import ChatTemplate, Message, text_of_message
from tokenmill_server.processing.excerpts import Side, excerpt, may_be_cut
from tokenmill_server.processing.fill_in_middle import find_fill_in_middle
from tokenmill_server.processing.generation import GenerationRequest
from tokenmill_server.processing.media_supply import MediaSupply
from tokenmill_server.processing.sampling_checks import (
    check_priority,
    check_sampling,
    check_some_token_is_possible,
    check_token_ids,
)
from tokenmill_server.processing.structured import spec_of
from tokenmill_server.processing.tokenizer import Tokenizer

_GREEDY_BELOW = 1e-5
"""Temperatures below mean greedy decoding."""
_MAX_INLINE_CHAT_CHARS = 65536
"""Longer conversations are rendered in a thread: a template is Python, a few milliseconds for so much."""
_CHARS_PER_TOOL = 1024
"""What a tool that is described, or a call of one, takes about."""
_CHARS_PER_MESSAGE = 64
"""What a message costs beside its text."""


@dataclass(slots=True, frozen=True)
class Prompt:
    """One tokenized prompt. `text` is None where the client sent ids."""

    token_ids: Sequence[int]
    text: str | None = None
    param: str = "prompt"
    """The request field it came from."""
    media: tuple[MediaItem, ...] = ()
    """Ascending by offset; without tensors if there is a supply."""
    media_supply: MediaSupply | None = None
    second_text: int = 0
    """As in `AddRequest`."""


@dataclass(slots=True, frozen=True)
class Truncation:
    """`max_tokens` of the prompt are kept (-1: as many as the model takes): with `left` the last ones."""

    max_tokens: int
    side: Side = "left"


@dataclass(slots=True, frozen=True)
class ChatOptions:
    """How a conversation becomes a prompt."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    template: ChatTemplate | None = None
    """That of the request; None: the model's own."""
    unread: Sequence[str] = ()
    """Fields of the request that the template does not look at."""


class InputProcessor:
    """Holds the limits of the model that is served."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, config: EngineConfig) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.max_model_len = config.model.max_model_len
        """Longest prompt + output in tokens. Engines may lower it when they know what their memory holds."""
        self.vocab_size = config.model.architecture.vocab_size
        self.template_variables: Set[str] = frozenset() if template is None else template.variables
        """Names that the chat template reads from outside."""
        self.fill_in_middle = find_fill_in_middle(tokenizer)
        """How the model is asked for the middle of a text; None: it does not know that."""
        self.num_reserved = 0 if config.model.pooling is not None else 1
        """Tokens that a prompt must leave room for."""
        self._max_logprobs = config.model.max_logprobs
        self.eos_token_ids = config.model.eos_token_ids
        self._structured_output = config.structured_output
        self._priorities = config.scheduler.policy == "priority"
        self._last_sampling: tuple[SamplingParams | None, SamplingParams] = (None, SamplingParams())
        self._max_token_bytes = max(map(len, tokenizer.token_bytes), default=1)

    async def encode_text(
        self, text: str, add_special_tokens: bool = True, truncation: Truncation | None = None, param: str = "prompt"
    ) -> Prompt:
        """Tokenizes `text`. Raises ContextLengthError for text that cannot fit whatever its tokens are."""
        return (await self.encode_texts([text], add_special_tokens, truncation, param))[0]

    async def encode_texts(
        self,
        texts: Sequence[str],
        add_special_tokens: bool = True,
        truncation: Truncation | None = None,
        param: str = "prompt",
    ) -> list[Prompt]:
        """Like `encode_text` for each text."""
        if truncation is None:
            self.check_text_length(max(map(len, texts)), self.max_model_len, param)
        batch = await self.tokenizer.encode_many(await self.excerpts(texts, truncation, param), add_special_tokens)
        return [
            Prompt(self.truncated(token_ids, truncation), text, param)
            for text, token_ids in zip(texts, batch, strict=True)
        ]

    async def excerpts(self, texts: Sequence[str], truncation: Truncation | None, param: str) -> Sequence[str]:
        """What of each text is to be tokenized: a part, if the rest is cut off anyway.

        Raises ContextLengthError for a part without truncation, which is more than the model takes.
        """
        limit = len(self.truncated(range(self.max_model_len), truncation))
        side: Side = "right" if truncation is None else truncation.side
        if not any(may_be_cut(text, limit) for text in texts):
            return texts
        parts = await asyncio.to_thread(lambda: [excerpt(self.tokenizer, text, limit, side) for text in texts])
        if truncation is None:
            for text, part in zip(texts, parts, strict=True):
                if len(part) < len(text):
                    raise ContextLengthError(
                        f"the text has {len(text)} characters; its first {len(part)} are more than {limit} tokens",
                        param,
                    )
        return parts

    def take_token_ids(
        self, token_ids: Sequence[int], truncation: Truncation | None = None, param: str = "prompt"
    ) -> Prompt:
        """A prompt of ids.

        Raises InvalidRequestError for an id outside the vocabulary among those that are kept, ContextLengthError for
        more than the model takes.
        """
        kept = self.truncated(token_ids, truncation)
        self.check_fits(len(kept), param)
        check_token_ids(kept, self.vocab_size, param)
        return Prompt(kept, param=param)

    def check_text_length(self, num_chars: int, num_tokens: int, param: str) -> None:
        """Raises ContextLengthError for a text that has more than `num_tokens` tokens whatever they are."""
        if self.tokenizer.keeps_all_text and num_chars > num_tokens * self._max_token_bytes:
            raise ContextLengthError(
                f"the text has {num_chars} characters, which is more than {num_tokens} tokens can say", param
            )

    async def encode_chat(
        self, messages: list[Message], options: ChatOptions, truncation: Truncation | None = None
    ) -> Prompt:
        """Renders and tokenizes a conversation. Raises InvalidRequestError if the template rejects it."""
        text = await self.chat_text(messages, options)
        return await self.encode_text(text, options.add_special_tokens, truncation, param="messages")

    async def chat_text(self, messages: list[Message], options: ChatOptions) -> str:
        """Like `render_chat`, without blocking the event loop for long."""
        size = sum(len(text_of_message(message)) + _CHARS_PER_MESSAGE for message in messages)
        size += _CHARS_PER_TOOL * len(options.template_variables.get("tools") or ())
        size += _CHARS_PER_TOOL * sum(len(message.get("tool_calls") or ()) for message in messages)
        if size <= _MAX_INLINE_CHAT_CHARS and options.template is None:  # of others nobody knows what they take
            return self.render_chat(messages, options)
        return await asyncio.to_thread(self.render_chat, messages, options)

    def render_chat(self, messages: list[Message], options: ChatOptions) -> str:
        """The prompt text of a conversation."""
        template = options.template or self.template
        if template is None:
            raise InvalidRequestError("this model has no chat template; start the server with --chat-template FILE")
        if options.continue_final_message:
            if options.add_generation_prompt:
                raise InvalidRequestError(
                    "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
                )
            return template.render_continuation(messages, options.template_variables)
        return template.render(messages, options.add_generation_prompt, options.template_variables)

    def build(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        label: str = "",
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        deadline: float | None = None,
    ) -> GenerationRequest:
        """A request that the engine cannot refuse for what it says.

        Raises InvalidRequestError (ContextLengthError if the prompt is too long) naming the field.
        """
        self.check_priority(priority)
        return GenerationRequest(
            label=label,
            prompt_token_ids=prompt.token_ids,
            sampling=self._fitted(self._resolved(sampling), prompt),
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            prompt=prompt.text,
            priority=priority,
            cache_salt=cache_salt,
            deadline=deadline,
            media=prompt.media,
            media_supply=prompt.media_supply,
        )

    def check_priority(self, priority: int) -> None:
        """Raises InvalidRequestError if the scheduler would not look at it."""
        check_priority(priority)
        if priority and not self._priorities:
            raise InvalidRequestError("priority needs a server started with --scheduling-policy priority", "priority")

    def _fitted(self, sampling: SamplingParams, prompt: Prompt) -> SamplingParams:
        max_tokens = self._max_tokens(sampling.max_tokens, prompt)
        if sampling.min_tokens > max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {sampling.min_tokens} but only {max_tokens} tokens fit after the prompt", "min_tokens"
            )
        return msgspec.structs.replace(sampling, max_tokens=max_tokens)

    def _resolved(self, sampling: SamplingParams) -> SamplingParams:
        """Checked, and with everything filled in that does not depend on the prompt. Most requests are sampled like the
        one before: that is worked on once."""
        last, resolved = self._last_sampling
        if sampling is last or (sampling.structured_outputs is None and sampling == last):
            return resolved
        check_sampling(sampling, self.vocab_size, self._max_logprobs)
        changes: dict[str, Any] = {}
        if sampling.temperature < _GREEDY_BELOW:
            changes["temperature"] = 0.0
        if sampling.structured_outputs is not None:
            changes["structured"] = spec_of(sampling.structured_outputs, self._structured_output)
            changes["structured_outputs"] = None
        if sampling.bad_words:
            changes["bad_words_token_ids"] = self._bad_words(sampling.bad_words)
        if sampling.logprobs == -1:
            changes["logprobs"] = self.vocab_size
        if sampling.prompt_logprobs == -1:
            changes["prompt_logprobs"] = self.vocab_size
        resolved = msgspec.structs.replace(sampling, **changes)
        check_some_token_is_possible(resolved, self.vocab_size, self.eos_token_ids)
        self._last_sampling = (sampling, resolved)
        return resolved

    def _max_tokens(self, wanted: int | None, prompt: Prompt) -> int:
        num_prompt_tokens = len(prompt.token_ids)
        if num_prompt_tokens == 0:
            raise InvalidRequestError("the prompt is empty", prompt.param)
        self.check_fits(num_prompt_tokens, prompt.param)
        room = self.max_model_len - num_prompt_tokens
        if wanted is not None and wanted > self.max_model_len:
            raise InvalidRequestError(
                f"max_tokens is {wanted}, above the model's maximum context length of {self.max_model_len}",
                "max_tokens",
            )
        return room if wanted is None else min(wanted, room)

    def check_fits(self, num_prompt_tokens: int, param: str) -> None:
        """Raises ContextLengthError for a prompt of so many tokens if that leaves no room for another; of a model that
        generates none, if it is too long itself."""
        if num_prompt_tokens > self.max_model_len - self.num_reserved:
            raise ContextLengthError(
                f"this model's maximum context length is {self.max_model_len} tokens and the prompt alone has "
                f"{num_prompt_tokens}; it may have at most {self.max_model_len - self.num_reserved}",
                param,
            )

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it is spelled at the start of a text and, if that differs, after a space."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip(" ")
            for spelling in (bare, f" {bare}"):
                token_ids = tuple(self.tokenizer.encode(spelling, add_special_tokens=False))
                if token_ids:
                    sequences[token_ids] = None
        return tuple(sequences)

    def truncated(self, token_ids: Sequence[int], truncation: Truncation | None) -> Sequence[int]:
        """What is left of a prompt. Raises InvalidRequestError for more than the model takes."""
        if truncation is None:
            return token_ids
        limit = self.max_model_len - self.num_reserved if truncation.max_tokens == -1 else truncation.max_tokens
        if not 0 <= limit <= self.max_model_len:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be -1 or between 0 and {self.max_model_len}", "truncate_prompt_tokens"
            )
        if len(token_ids) <= limit:
            return token_ids
        return token_ids[len(token_ids) - limit :] if truncation.side == "left" else token_ids[:limit]
