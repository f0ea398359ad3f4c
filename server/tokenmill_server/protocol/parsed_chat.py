"""Answers to chats whose output is parsed: with thinking, or with calls of tools."""

from collections.abc import Sequence
from typing import Any

from tokenmill_engine.errors import TokenmillError
from tokenmill_server.parsing.chat_output import ChatDelta
from tokenmill_server.parsing.plan import OutputPlan
from tokenmill_server.processing.generation import CompletionOutput, TokenLogprob
from tokenmill_server.processing.output_processor import Choice
from tokenmill_server.processing.sse import json_bytes
from tokenmill_server.protocol.chunks import ChatShape, ChoiceState, StreamSession
from tokenmill_server.protocol.logprobs import LogprobFormatter

Json = dict[str, Any]


def _with_thinking(body: Json, text: str | None) -> Json:
    """Clients know one of the two names, or the other."""
    return {**body, "reasoning": text, "reasoning_content": text}


class ParsedChat:
    """How the choices of one answer are shown."""

    def __init__(self, plan: OutputPlan, formatter: LogprobFormatter, token_bytes: Sequence[bytes]) -> None:
        self.plan = plan
        self.formatter = formatter
        self.token_bytes = token_bytes

    def choice(self, choice: CompletionOutput, echo: str, return_token_ids: bool) -> Json:
        """A choice of a `chat.completion`."""
        delta = self.plan.parse(choice.text)
        hidden = 0 if self.plan.include_reasoning else self.num_reasoning_tokens(choice)
        body: Json = {
            "index": choice.index,
            "message": self._message(delta, echo),
            "logprobs": None if choice.logprobs is None else self.formatter.chat(choice.logprobs[hidden:]),
            "finish_reason": self.plan.finish_reason(str(choice.finish_reason), len(delta.calls)),
            "stop_reason": choice.stop_reason,
        }
        if return_token_ids:
            body["token_ids"] = choice.token_ids[hidden:]
        return body

    def num_reasoning_tokens(self, choice: CompletionOutput) -> int:
        """Of one choice."""
        counter = self.plan.counter(self.token_bytes)
        if counter is None:
            return 0
        counter.count(choice.token_ids)
        return counter.num_tokens

    def reasoning_tokens(self, choices: Sequence[CompletionOutput]) -> int | None:
        """Of all choices; None if nobody looks for thinking."""
        return None if self.plan.reasoning is None else sum(map(self.num_reasoning_tokens, choices))

    def _message(self, delta: ChatDelta, echo: str) -> Json:
        content: str | None = echo + delta.content
        if not content and not self.plan.is_forced and (delta.calls or (self.plan.shows_reasoning and delta.reasoning)):
            content = None
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if self.plan.shows_reasoning:
            message = _with_thinking(message, delta.reasoning or None)
        if delta.calls and self.plan.calls_functions:
            message["function_call"] = delta.calls[0].function_body()
        elif delta.calls:
            message["tool_calls"] = [call.message_body() for call in delta.calls]
        return message


class _State:
    """Output of a choice that waits for its chunk."""

    def __init__(self, parsed: ParsedChat) -> None:
        self.output = parsed.plan.output()
        self.counter = parsed.plan.counter(parsed.token_bytes)
        self.delta = ChatDelta()
        self.waiting = ChoiceState()
        self._num_hidden = 0

    def hide_thinking(self) -> bool:
        """Takes tokens that are thinking out of those that wait. Returns whether it is known which these are."""
        if self.counter is None:
            return True
        waiting, num_new = self.waiting, self.counter.num_tokens - self._num_hidden
        del waiting.token_ids[:num_new]
        del waiting.logprobs[:num_new]
        self._num_hidden += num_new
        return self.counter.decided


class ParsedChoiceStream:
    """The `OutputListener` of a chat whose output is parsed."""

    def __init__(self, session: StreamSession, shape: ChatShape, parsed: ParsedChat, num_choices: int) -> None:
        self._session = session
        self._shape = shape
        self._parsed = parsed
        self._states = [_State(parsed) for _ in range(num_choices)]
        options = session.options
        self._fast = options.interval == 1 and not options.return_token_ids and not options.continuous_usage
        if parsed.plan.reasoning is not None:
            session.reasoning = [state.counter for state in self._states if state.counter is not None]
        session.expect(num_choices)

    def on_delta(
        self, choice: Choice, text: str, token_ids: Sequence[int], logprobs: list[TokenLogprob] | None
    ) -> None:
        state, finished = self._states[choice.index], choice.finish_reason is not None
        waiting = state.waiting
        if not waiting.started:
            waiting.started = True
            waiting.num_waiting = self._session.options.interval  # the first chunk does not wait
            self._session.buffer.write(self._shape.start(self._session, choice.index, waiting, choice))
        if state.counter is not None:
            state.counter.count(token_ids)
        delta = state.output.push(text)
        if self._fast and logprobs is None and not finished:
            self._write_now(choice.index, delta)
            return
        waiting.add("", token_ids, logprobs)
        state.delta.add(delta)
        if finished:
            state.delta.add(state.output.finish())
        if finished or waiting.num_waiting >= self._session.options.interval:
            if not self._parsed.plan.include_reasoning and not state.hide_thinking() and not finished:
                return
            self._send(choice, state)

    def _write_now(self, index: int, delta: ChatDelta) -> None:
        """A chunk with nothing but this."""
        session = self._session
        if delta.content and not delta.calls and not delta.reasoning:
            prefix = session.prefix + str(index).encode() + self._shape.plain_prefix
            session.buffer.write(prefix + json_bytes(delta.content) + self._shape.plain_suffix)
        elif body := self._delta(delta):
            session.buffer.write(session.chunk({"index": index, "delta": body, "finish_reason": None}))

    def on_error(self, error: TokenmillError) -> None:
        self._session.buffer.close(error)

    def _send(self, choice: Choice, state: _State) -> None:
        finished, waiting = choice.finish_reason is not None, state.waiting
        with_token_ids = self._session.options.return_token_ids
        delta = self._delta(state.delta)
        if not (delta or waiting.logprobs or finished or (with_token_ids and waiting.token_ids)):
            return
        body: Json = {"index": choice.index, "delta": delta}
        if waiting.logprobs:
            body["logprobs"] = self._parsed.formatter.chat(waiting.logprobs)
        if with_token_ids:
            body["token_ids"] = waiting.token_ids
        body["finish_reason"] = None
        if choice.finish_reason is not None:
            body["finish_reason"] = self._parsed.plan.finish_reason(str(choice.finish_reason), state.output.num_calls)
            body["stop_reason"] = choice.stop_reason
        told_here = finished and not self._session.options.include_usage
        chunk = self._session.chunk(body, self._session.timings() if told_here else None)
        state.delta = ChatDelta()
        waiting.clear()
        if finished:
            self._session.choice_finished(chunk)
        else:
            self._session.buffer.write(chunk)

    def _delta(self, delta: ChatDelta) -> Json:
        body: Json = {}
        if delta.reasoning and self._parsed.plan.shows_reasoning:
            body = _with_thinking(body, delta.reasoning)
        if delta.content:
            body["content"] = delta.content
        if delta.calls and self._parsed.plan.calls_functions:
            body["function_call"] = delta.calls[0].function_body()
        elif delta.calls:
            body["tool_calls"] = [call.body() for call in delta.calls]
        return body
