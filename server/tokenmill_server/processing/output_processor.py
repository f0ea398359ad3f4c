"""From new tokens to new text: detokenization, stop strings and log-probabilities of every choice of a request.

Pure bookkeeping: no sockets, no event loop. Whoever wants the output implements `OutputListener`.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from tokenmill_engine.errors import TokenmillError
from tokenmill_engine.messages import Finish, FinishReason, SamplingParams, TokenLogprobs
from tokenmill_server.processing.detokenizer import Detokenizer
from tokenmill_server.processing.generation import GenerationRequest, TokenLogprob
from tokenmill_server.processing.logprobs import unpack_logprobs
from tokenmill_server.processing.repetition import RepetitionDetector
from tokenmill_server.processing.stop_strings import StopStrings
from tokenmill_server.processing.tokenizer import Tokenizer


class OutputListener(Protocol):
    """Receives what a generation yields. Called from the event loop; must not block."""

    def on_delta(
        self, choice: "Choice", text: str, token_ids: Sequence[int], logprobs: list[TokenLogprob] | None
    ) -> None:
        """New output of one choice. Text may lag behind the tokens. `choice.finish_reason` is set with the last."""

    def on_error(self, error: TokenmillError) -> None:
        """The generation failed. Nothing follows, for any of its choices."""


class Generation:
    """The state of one prompt's choices. Done when `num_open` is 0."""

    __slots__ = (
        "_num_silent",
        "_prompt_logprobs",
        "choices",
        "deadline_timer",
        "engine",
        "first_token_time",
        "listener",
        "may_move",
        "num_cached_tokens",
        "num_open",
        "num_preemptions",
        "num_queued_tokens",
        "prefill_s",
        "request",
        "vector",
    )

    def __init__(self, request: GenerationRequest, listener: OutputListener, tokenizer: Tokenizer, engine: int) -> None:
        sampling = request.sampling
        self.request = request
        self.listener = listener
        self.engine = engine
        self.may_move = True
        """To another engine core, if this one is lost before it has begun."""
        self.num_cached_tokens = 0
        self.prefill_s = 0.0
        """From the first step in the engine core to the first token."""
        self.num_preemptions: int | None = None
        """None until the engine core has told it, with the end of a choice."""
        self.num_queued_tokens = 0
        """Prompt tokens, until the first token of the answer is there."""
        self.deadline_timer: asyncio.TimerHandle | None = None
        self.first_token_time: float | None = None
        self.vector: bytes | None = None
        """As in `RequestOutput`; it comes with the end."""
        self._prompt_logprobs: list[TokenLogprobs] = []
        self.choices = [Choice(index, self, tokenizer) for index in range(sampling.n)]
        self.num_open = sampling.n
        self._num_silent = sampling.n

    @property
    def has_begun(self) -> bool:
        """Whether anything of the answer has come."""
        is_silent = self._num_silent == self.num_open == len(self.choices)
        return not is_silent or bool(self._prompt_logprobs)

    @property
    def num_tokens(self) -> int:
        """Generated tokens of all choices."""
        return sum(choice.num_tokens for choice in self.choices)

    def keep_texts(self) -> None:
        """Of all choices, from now on."""
        for choice in self.choices:
            choice.said = []

    def answered(self) -> None:
        """A choice has its first tokens. Once all have, the engine needs nothing of the request any more."""
        self._num_silent -= 1
        if self._num_silent == 0 and self.request.media_supply is not None:
            self.request.media_supply.settle()

    def add_prompt_logprobs(self, choice: "Choice", message: TokenLogprobs) -> None:
        """All choices compute the same ones; those of the first count."""
        if choice.index == 0:
            self._prompt_logprobs.append(message)

    def prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """One entry per prompt token, the first of them None; None if they were not asked for. Takes a microsecond per
        value, of which there may be millions."""
        if self.request.sampling.prompt_logprobs is None:
            return None
        entries: list[TokenLogprob | None] = [None]
        for message in self._prompt_logprobs:
            entries.extend(unpack_logprobs(message))
        del entries[len(self.request.prompt_token_ids) :]
        return entries


class Choice:
    """One sequence being generated."""

    __slots__ = (
        "_detokenizer",
        "_num_hidden",
        "_repetition",
        "_sampling",
        "_stops",
        "finish_reason",
        "generation",
        "index",
        "last_token_time",
        "num_tokens",
        "request_id",
        "said",
        "stop_reason",
    )

    def __init__(self, index: int, generation: Generation, tokenizer: Tokenizer) -> None:
        sampling = generation.request.sampling
        self.index = index
        self.generation = generation
        self.request_id = -1
        """Internal id, set when it is sent to the engine."""
        self.num_tokens = 0
        self.last_token_time = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.said: list[str] | None = None
        """Its text in pieces, if somebody is to read it once more."""
        self._sampling: SamplingParams = sampling
        self._detokenizer = Detokenizer(
            tokenizer, sampling.skip_special_tokens, generation.request.prompt_token_ids[-8:]
        )
        detection = sampling.repetition_detection
        self._repetition = RepetitionDetector(detection) if detection is not None else None
        self._stops = StopStrings(sampling.stop, sampling.include_stop_str_in_output) if sampling.stop else None

    def push(self, token_ids: list[int], finish: Finish | None, logprobs: TokenLogprobs | None) -> bool:
        """Takes the tokens of one step and tells the listener. Returns whether a stop string or a repetition ended the
        choice while the engine still works on it."""
        num_visible = len(token_ids)
        if (
            finish is not None
            and finish.reason is FinishReason.STOP
            and num_visible
            and not self._sampling.include_stop_str_in_output
        ):
            num_visible -= 1  # the token that means "stop" is no text
        repeats = False
        if self._stops is None and logprobs is None and self._repetition is None:
            self.num_tokens += len(token_ids)
            visible = token_ids if num_visible == len(token_ids) else token_ids[:num_visible]
            text = self._detokenizer.push(visible)
            entries = None
        else:
            token_ids, text, entries, repeats = self._push_each(token_ids, num_visible, logprobs)
        stopped = self._stops is not None and self._stops.matched is not None
        if stopped:
            self._end(FinishReason.STOP, self._stops.matched if self._stops is not None else None)
        elif repeats:
            text += self._held_back()
            self._end(FinishReason.REPETITION, None)
        elif finish is not None:
            text += self._held_back()
            self.generation.num_preemptions = (self.generation.num_preemptions or 0) + finish.num_preemptions
            self._end(finish.reason, finish.stop_token_id)
        if self.said is not None:
            self.said.append(text)
        self.generation.listener.on_delta(self, text, token_ids, entries)
        return (stopped or repeats) and finish is None

    def _push_each(
        self, token_ids: list[int], num_visible: int, logprobs: TokenLogprobs | None
    ) -> tuple[list[int], str, list[TokenLogprob] | None, bool]:
        """Token by token, where their borders matter. Returns the tokens up to a stop string or a repetition, their
        text and their log-probabilities, and whether it is a repetition."""
        entries = None if logprobs is None else unpack_logprobs(logprobs)
        pieces = []
        repeats = False
        for position, token_id in enumerate(token_ids):
            piece = self._detokenizer.push((token_id,)) if position < num_visible else ""
            self.num_tokens += 1
            if entries is not None:
                entries[position].text = piece
            if self._stops is not None:
                piece = self._stops.push(piece, may_stop=self.num_tokens >= self._sampling.min_tokens)
            pieces.append(piece)
            may_repeat = position < num_visible and self.num_tokens >= self._sampling.min_tokens
            repeats = self._repetition is not None and self._repetition.push(token_id) and may_repeat
            if repeats or (self._stops is not None and self._stops.matched is not None):
                token_ids = token_ids[: position + 1]
                entries = entries[: position + 1] if entries is not None else None
                break
        return token_ids, "".join(pieces), entries, repeats

    def _held_back(self) -> str:
        return "" if self._stops is None else self._stops.flush()

    def _end(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.generation.num_open -= 1
