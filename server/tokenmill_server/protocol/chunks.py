"""The chunks of streamed answers: an `OutputListener` per prompt that writes server-sent events.

Order (chat): per choice a chunk with the role when its first output arrives, chunks with text, a last one with the
finish reason; then, if asked for, one chunk with the usage and no choices; then `[DONE]`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tokenmill_engine.errors import TokenmillError
from tokenmill_server.parsing.reasoning import ReasoningCounter
from tokenmill_server.processing.generation import TokenLogprob
from tokenmill_server.processing.output_processor import Choice, Generation
from tokenmill_server.processing.sse import DONE, EventBuffer, event, json_bytes
from tokenmill_server.processing.timings import timings_of
from tokenmill_server.protocol.echo import EchoedPrompt
from tokenmill_server.protocol.logprobs import LogprobFormatter
from tokenmill_server.protocol.replies import ReplyHead, Usage

Json = dict[str, Any]


@dataclass(slots=True, frozen=True)
class StreamOptionsInEffect:
    """What the client asked the chunks to carry."""

    interval: int = 1
    """Tokens per chunk; the first chunk of a choice never waits."""
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    timings: bool = False
    """With the usage, or with the last chunk of a choice if there is none."""


class StreamSession:
    """What the streams of all prompts of one HTTP request share: the buffer, the head of every chunk, the usage."""

    def __init__(self, buffer: EventBuffer, head: ReplyHead, kind: str, options: StreamOptionsInEffect) -> None:
        self.buffer = buffer
        self.options = options
        self.generations: list[Generation] = []
        self.reasoning: list[ReasoningCounter] | None = None
        """Count the tokens that are thinking, of each choice; None: nobody looks for them."""
        self._head = head
        self._kind = kind
        self._num_open = 0
        fixed = json_bytes({"id": head.id, "object": kind, "created": head.created, "model": head.model})
        self.prefix = b'data: %b,"choices":[{"index":' % fixed[:-1]
        """Everything up to the index of a choice."""

    def expect(self, num_choices: int) -> None:
        """`num_choices` more choices must finish before the stream ends."""
        self._num_open += num_choices

    def choice_finished(self, last_chunk: bytes) -> None:
        """Writes the last chunk of a choice; after that of the last choice also the end of the stream."""
        self._num_open -= 1
        if self._num_open > 0:
            self.buffer.write(last_chunk)
            return
        usage = self.usage_chunk(self.usage(), self.timings()) if self.options.include_usage else b""
        self.buffer.finish(b"".join((last_chunk, usage, DONE)))

    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(
            prompt_tokens=sum(len(generation.request.prompt_token_ids) for generation in self.generations),
            completion_tokens=sum(generation.num_tokens for generation in self.generations),
            cached_tokens=sum(generation.num_cached_tokens for generation in self.generations),
            reasoning_tokens=None if self.reasoning is None else sum(each.num_tokens for each in self.reasoning),
        )

    def chunk(self, choice: Json, extra: Json | None = None) -> bytes:
        """A chunk with one choice, the general way."""
        body = {**self._fixed_fields(), "choices": [choice]}
        if choice.get("finish_reason") is not None:
            body["system_fingerprint"] = self._head.fingerprint
        if self.options.continuous_usage:
            body["usage"] = self.usage().body()
        return event(body | (extra or {}))

    def usage_chunk(self, usage: Usage, extra: Json | None = None) -> bytes:
        """The chunk without choices that ends a stream with usage."""
        return event({**self._fixed_fields(), "choices": [], "usage": usage.body(), **(extra or {})})

    def timings(self) -> Json:
        """`metrics` of a complete answer, if they are wanted and there is one choice of one prompt."""
        if not self.options.timings or len(self.generations) != 1:
            return {}
        metrics = timings_of(self.generations[0])
        return {} if metrics is None else {"metrics": metrics}

    def _fixed_fields(self) -> Json:
        head = self._head
        return {"id": head.id, "object": self._kind, "created": head.created, "model": head.model}


@dataclass(slots=True)
class ChoiceState:
    """Output of a choice that waits for its chunk."""

    started: bool = False
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_waiting: int = 0
    """Tokens since the last chunk."""
    text_offset: int = 0
    """Length of the text before the waiting log-probabilities."""

    def add(self, text: str, token_ids: Sequence[int], logprobs: list[TokenLogprob] | None) -> None:
        self.text += text
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs or ())
        self.num_waiting += len(token_ids)

    def clear(self) -> None:
        self.text_offset += sum(len(entry.text) for entry in self.logprobs)
        self.text = ""
        self.token_ids = []
        self.logprobs = []
        self.num_waiting = 0


class Shape(Protocol):
    """What differs between chat and completions."""

    plain_prefix: bytes
    """Between a choice's index and the JSON of its text, in a chunk with nothing but text."""
    plain_suffix: bytes

    def start(self, session: StreamSession, index: int, state: ChoiceState, choice: Choice) -> bytes:
        """Events before the first text of a choice."""

    def choice(self, index: int, state: ChoiceState, with_token_ids: bool) -> Json:
        """The choice of a chunk with what is waiting in `state`."""


class ChoiceStream:
    """The `OutputListener` of one prompt. Its choices have the indexes `first_index`.. in the answer."""

    def __init__(self, session: StreamSession, shape: Shape, num_choices: int, first_index: int = 0) -> None:
        options = session.options
        self._session = session
        self._shape = shape
        self._first_index = first_index
        self._states = [ChoiceState() for _ in range(num_choices)]
        self._rich = options.return_token_ids
        self._fast = options.interval == 1 and not options.return_token_ids and not options.continuous_usage
        self._interval = options.interval
        self._write = session.buffer.write
        self._prefixes = [
            session.prefix + str(first_index + index).encode() + shape.plain_prefix for index in range(num_choices)
        ]
        self._suffix = shape.plain_suffix
        session.expect(num_choices)

    def on_delta(
        self, choice: Choice, text: str, token_ids: Sequence[int], logprobs: list[TokenLogprob] | None
    ) -> None:
        state = self._states[choice.index]
        if not state.started:
            state.started = True
            state.num_waiting = self._interval  # the first chunk does not wait
            opening = self._shape.start(self._session, self._first_index + choice.index, state, choice)
            if opening:
                self._write(opening)
        if self._fast and logprobs is None and choice.finish_reason is None:
            if text:
                self._write(self._prefixes[choice.index] + json_bytes(text) + self._suffix)
            return
        state.add(text, token_ids, logprobs)
        if choice.finish_reason is not None or state.num_waiting >= self._interval:
            self._send(choice, state)

    def on_error(self, error: TokenmillError) -> None:
        self._session.buffer.close(error)

    def _send(self, choice: Choice, state: ChoiceState) -> None:
        finished = choice.finish_reason is not None
        if not (state.text or state.logprobs or finished or (self._rich and state.token_ids)):
            return
        body = self._shape.choice(self._first_index + choice.index, state, self._rich)
        body["finish_reason"] = choice.finish_reason
        if finished:
            body["stop_reason"] = choice.stop_reason
        told_here = finished and not self._session.options.include_usage
        chunk = self._session.chunk(body, self._session.timings() if told_here else None)
        state.clear()
        if finished:
            self._session.choice_finished(chunk)
        else:
            self._write(chunk)


class ChatShape:
    """Chunks of `chat.completion.chunk`."""

    plain_prefix = b',"delta":{"content":'
    plain_suffix = b'},"finish_reason":null}]}\n\n'

    def __init__(self, formatter: LogprobFormatter, echo: str = "", opening: Json | None = None) -> None:
        """`opening`: more fields of the first chunk of each choice."""
        self.formatter = formatter
        self.echo = echo
        self.opening = opening or {}

    def start(self, session: StreamSession, index: int, state: ChoiceState, choice: Choice) -> bytes:
        extra = dict(self.opening)
        if session.options.return_token_ids:
            extra["prompt_token_ids"] = list(choice.generation.request.prompt_token_ids)
        body: Json = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        events = session.chunk(body, extra)
        if self.echo:
            events += session.chunk({"index": index, "delta": {"content": self.echo}, "finish_reason": None})
        return events

    def choice(self, index: int, state: ChoiceState, with_token_ids: bool) -> Json:
        body: Json = {
            "index": index,
            "delta": {"content": state.text} if state.text or state.logprobs or with_token_ids else {},
        }
        if state.logprobs:
            body["logprobs"] = self.formatter.chat(state.logprobs)
        if with_token_ids:
            body["token_ids"] = state.token_ids
        return body


class CompletionShape:
    """Chunks of `text_completion`. With `echo` the prompt is the first text of every choice."""

    plain_prefix = b',"text":'
    plain_suffix = b',"logprobs":null,"finish_reason":null}]}\n\n'

    def __init__(self, formatter: LogprobFormatter, echo: Callable[[Generation], EchoedPrompt] | None = None) -> None:
        self._formatter = formatter
        self._echo = echo

    def start(self, session: StreamSession, index: int, state: ChoiceState, choice: Choice) -> bytes:
        generation = choice.generation
        body: Json = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
        if session.options.return_token_ids:
            body["prompt_token_ids"] = list(generation.request.prompt_token_ids)
        if self._echo is not None:
            echoed = self._echo(generation)
            body["text"] = echoed.text
            if echoed.entries:
                body["logprobs"] = self._formatter.completion(echoed.entries, echoed.pieces, 0)
            state.text_offset = len(echoed.text)
        elif not session.options.return_token_ids:
            return b""
        return session.chunk(body)

    def choice(self, index: int, state: ChoiceState, with_token_ids: bool) -> Json:
        body: Json = {"index": index, "text": state.text, "logprobs": None}
        if state.logprobs:
            texts = [entry.text for entry in state.logprobs]
            body["logprobs"] = self._formatter.completion(state.logprobs, texts, state.text_offset)
        if with_token_ids:
            body["token_ids"] = state.token_ids
        return body
